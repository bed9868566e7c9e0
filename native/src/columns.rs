//! Columns under construction: Arrow's buffers, extended value by value, and cut back by record.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::collections::{HashMap, HashSet};

/// Days and microseconds since 1970 of the years 0001 to 9999, both ends included.
const DAYS: std::ops::RangeInclusive<i64> = -719_162..=2_932_896;
const MICROS: std::ops::RangeInclusive<i64> = -62_135_596_800_000_000..=253_402_300_799_999_999;
const DAY: i64 = 86_400_000_000;

/// The type of a column; numbers have their width in bytes.
#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Bool,
    Int(u32),
    Float(u32),
    Decimal { precision: u32, scale: u32 },
    Text,
    Json,
    Binary,
    Date,
    Timestamp { zoned: bool },
    Time,
    List,
    Struct,
    Map,
}

pub struct Column {
    pub name: Vec<u8>,
    pub kind: Kind,
    pub nullable: bool,
    pub children: Vec<Column>,
    by_name: HashMap<Vec<u8>, usize>,
    valid: Vec<u8>,
    offsets: Vec<i32>,
    data: Vec<u8>,
}

/// A column for Python: its length, its number of nulls, its buffers and its children.
#[derive(IntoPyObject)]
pub struct Made<'py>(
    usize,
    usize,
    Vec<Option<Bound<'py, PyBytes>>>,
    Vec<Made<'py>>,
);

/// The rows of the values that were read, their number, and the positions of the others.
pub type Rows<'py> = (usize, Vec<Made<'py>>, Bound<'py, PyBytes>);

impl Column {
    /// A column from its layout: kind, name, nullable, two numbers of the kind, children.
    pub fn new(layout: &Bound<'_, PyAny>) -> PyResult<Column> {
        type Layout<'py> = (String, String, bool, u32, u32, Vec<Bound<'py, PyAny>>);
        let (kind, name, nullable, a, b, children): Layout = layout.extract()?;
        let kind = match (kind.as_str(), children.len()) {
            ("bool", 0) => Kind::Bool,
            ("int", 0) if matches!(a, 1 | 2 | 4 | 8) => Kind::Int(a),
            ("float", 0) if matches!(a, 4 | 8) => Kind::Float(a),
            ("decimal", 0) if a <= 38 && b <= a => Kind::Decimal {
                precision: a,
                scale: b,
            },
            ("text", 0) => Kind::Text,
            ("json", 0) => Kind::Json,
            ("binary", 0) => Kind::Binary,
            ("date", 0) => Kind::Date,
            ("timestamp", 0) => Kind::Timestamp { zoned: a == 1 },
            ("time", 0) => Kind::Time,
            ("list", 1) => Kind::List,
            ("struct", _) => Kind::Struct,
            ("map", 2) => Kind::Map,
            _ => return Err(PyValueError::new_err(format!("no such column: {kind}"))),
        };
        let children = children
            .iter()
            .map(Column::new)
            .collect::<PyResult<Vec<_>>>()?;
        let names = children.iter().enumerate();
        Ok(Column {
            by_name: names
                .map(|(index, child)| (child.name.clone(), index))
                .collect(),
            name: name.into_bytes(),
            kind,
            nullable,
            children,
            valid: vec![],
            offsets: vec![0],
            data: vec![],
        })
    }

    pub fn len(&self) -> usize {
        self.valid.len()
    }

    /// The index of a child; `guess` is tried first.
    pub fn find(&self, name: &[u8], guess: usize) -> Option<usize> {
        match self.children.get(guess) {
            Some(child) if child.name == name => Some(guess),
            _ => self.by_name.get(name).copied(),
        }
    }

    pub fn null(&mut self) -> Option<()> {
        self.nullable.then(|| self.blank())
    }

    fn blank(&mut self) {
        if let Some(width) = self.width() {
            self.data.resize(self.data.len() + width, 0);
        } else if self.kind == Kind::Struct {
            self.children.iter_mut().for_each(Column::blank);
        } else {
            self.offsets.extend(self.offsets.last().copied());
        }
        self.valid.push(0);
    }

    fn fixed<const N: usize>(&mut self, value: [u8; N]) -> Option<()> {
        self.data.extend_from_slice(&value);
        self.mark()
    }

    /// The end of a struct whose children have their values.
    pub fn mark(&mut self) -> Option<()> {
        self.valid.push(1);
        Some(())
    }

    pub fn bool(&mut self, value: bool) -> Option<()> {
        if self.kind == Kind::Bool {
            self.fixed([u8::from(value)])
        } else {
            None
        }
    }

    /// A whole number, date, time or instant.
    pub fn int(&mut self, value: i64) -> Option<()> {
        let fits = match self.kind {
            Kind::Date => DAYS.contains(&value),
            Kind::Timestamp { .. } => MICROS.contains(&value),
            Kind::Time => (0..DAY).contains(&value),
            _ => true,
        };
        match self.kind {
            _ if !fits => None,
            Kind::Int(1) => self.fixed(i8::try_from(value).ok()?.to_le_bytes()),
            Kind::Int(2) => self.fixed(i16::try_from(value).ok()?.to_le_bytes()),
            Kind::Int(4) | Kind::Date => self.fixed(i32::try_from(value).ok()?.to_le_bytes()),
            Kind::Int(_) | Kind::Timestamp { .. } | Kind::Time => self.fixed(value.to_le_bytes()),
            Kind::Float(_) => self.float(value as f64),
            _ => None,
        }
    }

    pub fn float(&mut self, value: f64) -> Option<()> {
        match self.kind {
            Kind::Float(4) => self.fixed((value as f32).to_le_bytes()),
            Kind::Float(_) => self.fixed(value.to_le_bytes()),
            _ => None,
        }
    }

    pub fn decimal(&mut self, unscaled: i128) -> Option<()> {
        match self.kind {
            Kind::Decimal { precision, .. } if unscaled.unsigned_abs() < 10u128.pow(precision) => {
                self.fixed(unscaled.to_le_bytes())
            }
            _ => None,
        }
    }

    /// A text or bytes; the text is UTF-8.
    pub fn bytes(&mut self, value: &[u8]) -> Option<()> {
        matches!(self.kind, Kind::Text | Kind::Json | Kind::Binary).then_some(())?;
        self.data.extend_from_slice(value);
        self.end()
    }

    /// Extend the bytes of the value whose end is marked later.
    pub fn open(&mut self) -> &mut Vec<u8> {
        &mut self.data
    }

    /// The end of a value that consists of bytes or children.
    pub fn end(&mut self) -> Option<()> {
        let end = match self.kind {
            Kind::Text | Kind::Json | Kind::Binary => self.data.len(),
            Kind::List | Kind::Map => self.children[0].len(),
            _ => return None,
        };
        self.offsets.push(i32::try_from(end).ok()?);
        self.mark()
    }

    /// True if the map that has not ended repeats a key.
    pub fn repeats(&self) -> bool {
        let keys = &self.children[0];
        let first = self.offsets.last().map_or(0, |&at| at as usize);
        let spans = keys.offsets[first..].windows(2);
        repeated(
            spans
                .map(|ends| &keys.data[ends[0] as usize..ends[1] as usize])
                .collect(),
        )
    }

    /// Forget all but the first `rows` values.
    pub fn truncate(&mut self, rows: usize) {
        self.valid.truncate(rows);
        if let Some(width) = self.width() {
            return self.data.truncate(rows * width);
        }
        let mut inside = rows;
        if self.kind != Kind::Struct {
            self.offsets.truncate(rows + 1);
            inside = self.offsets.last().map_or(0, |&at| at as usize);
            self.data.truncate(inside);
        }
        self.children
            .iter_mut()
            .for_each(|child| child.truncate(inside));
    }

    fn width(&self) -> Option<usize> {
        match self.kind {
            Kind::Bool => Some(1),
            Kind::Int(width) | Kind::Float(width) => Some(width as usize),
            Kind::Decimal { .. } => Some(16),
            Kind::Date => Some(4),
            Kind::Timestamp { .. } | Kind::Time => Some(8),
            _ => None,
        }
    }

    pub fn made<'py>(self, py: Python<'py>) -> PyResult<Made<'py>> {
        let rows = self.len();
        let nulls = self.valid.iter().filter(|&&valid| valid == 0).count();
        let mut buffers = vec![if nulls > 0 {
            Some(bits(py, &self.valid)?)
        } else {
            None
        }];
        if matches!(
            self.kind,
            Kind::Text | Kind::Json | Kind::Binary | Kind::List | Kind::Map
        ) {
            let fill = |out: &mut [u8]| {
                for (place, offset) in out.chunks_exact_mut(4).zip(&self.offsets) {
                    place.copy_from_slice(&offset.to_le_bytes());
                }
                Ok(())
            };
            buffers.push(Some(PyBytes::new_with(py, self.offsets.len() * 4, fill)?));
        }
        match self.kind {
            Kind::Bool => buffers.push(Some(bits(py, &self.data)?)),
            Kind::List | Kind::Struct | Kind::Map => {}
            _ => buffers.push(Some(PyBytes::new(py, &self.data))),
        }
        let children = self.children.into_iter().map(|child| child.made(py));
        let mut children = children.collect::<PyResult<Vec<_>>>()?;
        if self.kind == Kind::Map {
            let entries = children.first().map_or(0, |keys| keys.0);
            children = vec![Made(entries, 0, vec![None], children)];
        }
        Ok(Made(rows, nulls, buffers, children))
    }
}

fn bits<'py>(py: Python<'py>, flags: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    PyBytes::new_with(py, flags.len().div_ceil(8), |out| {
        for (byte, eight) in out.iter_mut().zip(flags.chunks(8)) {
            *byte = eight
                .iter()
                .enumerate()
                .fold(0, |bits, (at, flag)| bits | flag << at);
        }
        Ok(())
    })
}

pub fn repeated(keys: Vec<&[u8]>) -> bool {
    if keys.len() <= 16 {
        return (1..keys.len()).any(|at| keys[..at].contains(&keys[at]));
    }
    let mut seen = HashSet::new();
    keys.into_iter().any(|key| !seen.insert(key))
}

/// An Arrow array of type binary or large_binary; the caller holds it while its values are read.
pub struct Values {
    buffers: Vec<Option<(usize, usize)>>, // addresses and sizes
    first: usize,
    len: usize,
    width: usize,
}

impl Values {
    pub fn new(array: &Bound<'_, PyAny>) -> PyResult<Values> {
        let width = match &*array.getattr("type")?.str()?.to_cow()? {
            "binary" => 4,
            "large_binary" => 8,
            other => return Err(PyValueError::new_err(format!("no array of bytes: {other}"))),
        };
        let buffers: Vec<Option<Bound<'_, PyAny>>> = array.call_method0("buffers")?.extract()?;
        let place = |buffer: &Option<Bound<'_, PyAny>>| match buffer {
            None => Ok::<_, PyErr>(None),
            Some(b) => Ok(Some((
                b.getattr("address")?.extract()?,
                b.getattr("size")?.extract()?,
            ))),
        };
        Ok(Values {
            buffers: buffers.iter().map(place).collect::<PyResult<_>>()?,
            first: array.getattr("offset")?.extract()?,
            len: array.len()?,
            width,
        })
    }

    fn buffer(&self, index: usize) -> &[u8] {
        match self.buffers.get(index) {
            // SAFETY: pyarrow names the place of a buffer that the array holds; it is not null,
            // and nobody writes into the buffers of an array.
            Some(&Some((address, size))) if address != 0 && size > 0 => unsafe {
                std::slice::from_raw_parts(address as *const u8, size)
            },
            _ => &[],
        }
    }

    fn offset(&self, offsets: &[u8], index: usize) -> Option<usize> {
        let place = offsets.get(index * self.width..(index + 1) * self.width)?;
        let offset = match self.width {
            4 => i64::from(i32::from_le_bytes(place.try_into().ok()?)),
            _ => i64::from_le_bytes(place.try_into().ok()?),
        };
        usize::try_from(offset).ok()
    }

    /// Give each value to `read`, and cut `root` back after one that is unsure; returns the
    /// positions of these.
    pub fn each(
        &self,
        root: &mut Column,
        mut read: impl FnMut(&[u8], &mut Column) -> Option<()>,
    ) -> Vec<i64> {
        let (valid, offsets, data) = (self.buffer(0), self.buffer(1), self.buffer(2));
        let value = |index: usize| {
            if !valid.is_empty() && valid.get(index / 8)? >> (index % 8) & 1 == 0 {
                return None;
            }
            data.get(self.offset(offsets, index)?..self.offset(offsets, index + 1)?)
        };
        let mut unsure = vec![];
        for position in 0..self.len {
            let found = value(self.first + position);
            if !or_cut(root, |root| read(found?, root)) {
                unsure.push(position as i64);
            }
        }
        unsure
    }
}

/// Read a row into `root`, and cut it back if that is unsure; true if the row is there.
pub fn or_cut(root: &mut Column, read: impl FnOnce(&mut Column) -> Option<()>) -> bool {
    let rows = root.len();
    let sure = read(root).is_some();
    if !sure {
        root.truncate(rows);
    }
    sure
}

/// What a decoder returns to Python: the columns of `root`, and positions as bytes of int64.
pub fn rows<'py>(py: Python<'py>, root: Column, unsure: &[i64]) -> PyResult<Rows<'py>> {
    let count = root.len();
    let columns = root
        .children
        .into_iter()
        .map(|column| column.made(py))
        .collect::<PyResult<_>>()?;
    let unsure = PyBytes::new_with(py, unsure.len() * 8, |out| {
        for (place, position) in out.chunks_exact_mut(8).zip(unsure) {
            place.copy_from_slice(&position.to_le_bytes());
        }
        Ok(())
    })?;
    Ok((count, columns, unsure))
}
