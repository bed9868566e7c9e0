//! Avro datums to columns, by a plan that the reference's compiler makes of both schemas.
//!
//! The rules are those of `oncely.decode.avro_read`. `None` means "unsure" everywhere: the bytes
//! may be invalid, and the reference finds the reason.

use crate::columns::{rows, Column, Kind, Rows, Values};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;

/// How a writer's value is read. What several plans refer to in Python is one plan here, too: the
/// types of a schema may refer to each other so that their tree is exponentially larger.
pub enum Plan {
    Null,
    Boolean,
    Int,
    Long,
    Float,
    Double,
    Text,
    Bytes,
    Fixed(usize),
    /// A number times the unit, or divided by minus the unit.
    Scaled(Arc<Plan>, i64),
    Decimal(Arc<Plan>),
    /// The reader's symbols by the writer's index.
    Enum(Vec<Option<String>>),
    Union(Vec<Arc<Plan>>),
    Array(Arc<Plan>),
    Map(Arc<Plan>),
    /// Fields in the writer's order, with the index of their column.
    Record(Vec<(Arc<Plan>, Option<usize>)>),
    /// Defaults of fields that the writer has not.
    Whole(i64),
    Real(f64),
    Flag(bool),
    Given(Vec<u8>),
    /// A branch that no column takes.
    Fail,
}

impl Plan {
    pub fn new(made: &Bound<'_, PyAny>) -> PyResult<Arc<Plan>> {
        Plan::shared(made, &mut HashMap::new())
    }

    /// The plan of an object, made once; `made` keeps the objects of all addresses in `known`.
    fn shared(
        made: &Bound<'_, PyAny>,
        known: &mut HashMap<usize, Arc<Plan>>,
    ) -> PyResult<Arc<Plan>> {
        let address = made.as_ptr() as usize;
        if let Some(plan) = known.get(&address) {
            return Ok(plan.clone());
        }
        let plan = Arc::new(Plan::fresh(made, known)?);
        known.insert(address, plan.clone());
        Ok(plan)
    }

    fn fresh(made: &Bound<'_, PyAny>, known: &mut HashMap<usize, Arc<Plan>>) -> PyResult<Plan> {
        let kind: String = made.get_item(0)?.extract()?;
        let given = |index: usize| made.get_item(index);
        let mut inner = || Plan::shared(&given(1)?, known);
        Ok(match kind.as_str() {
            "null" => Plan::Null,
            "boolean" => Plan::Boolean,
            "int" => Plan::Int,
            "long" => Plan::Long,
            "float" => Plan::Float,
            "double" => Plan::Double,
            "string" => Plan::Text,
            "bytes" => Plan::Bytes,
            "fixed" => Plan::Fixed(given(1)?.extract()?),
            "scaled" => Plan::Scaled(inner()?, given(2)?.extract()?),
            "decimal" => Plan::Decimal(inner()?),
            "enum" => Plan::Enum(given(1)?.extract()?),
            "union" => {
                let branches: Vec<Bound<'_, PyAny>> = given(1)?.extract()?;
                let branch = |branch| Plan::shared(branch, known);
                Plan::Union(branches.iter().map(branch).collect::<PyResult<_>>()?)
            }
            "array" => Plan::Array(inner()?),
            "map" => Plan::Map(inner()?),
            "record" => {
                let fields: Vec<(Bound<'_, PyAny>, i64)> = given(1)?.extract()?;
                let field = |(step, slot): &(Bound<'_, PyAny>, i64)| {
                    Ok((Plan::shared(step, known)?, usize::try_from(*slot).ok()))
                };
                Plan::Record(fields.iter().map(field).collect::<PyResult<_>>()?)
            }
            "bool" => Plan::Flag(given(1)?.extract()?),
            "whole" => Plan::Whole(given(1)?.extract()?),
            "real" => Plan::Real(given(1)?.extract()?),
            "given" => Plan::Given(given(1)?.extract()?),
            "fail" => Plan::Fail,
            other => return Err(PyValueError::new_err(format!("no such plan: {other}"))),
        })
    }
}

struct Datum<'a> {
    data: &'a [u8],
    at: usize,
    /// The items of arrays that took no bytes.
    empty: usize,
}

impl<'a> Datum<'a> {
    fn left(&self) -> usize {
        self.data.len() - self.at
    }

    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let taken = self.data.get(self.at..self.at.checked_add(count)?)?;
        self.at += count;
        Some(taken)
    }

    /// A zigzag varint of at most 64 bits.
    fn long(&mut self) -> Option<i64> {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = *self.data.get(self.at)?;
            self.at += 1;
            if shift == 63 && byte > 1 {
                return None;
            }
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some((number >> 1) as i64 ^ -((number & 1) as i64));
            }
        }
        None
    }

    fn int(&mut self) -> Option<i64> {
        let number = self.long()?;
        i32::try_from(number).ok().map(i64::from)
    }

    fn index<'p, T>(&mut self, of: &'p [T]) -> Option<&'p T> {
        of.get(usize::try_from(self.long()?).ok()?)
    }

    fn whole(&mut self, plan: &Plan) -> Option<i64> {
        match plan {
            Plan::Int => self.int(),
            Plan::Long => self.long(),
            _ => None,
        }
    }

    /// The bytes of a text, fixed or bytes; a text is UTF-8.
    fn bytes(&mut self, plan: &Plan) -> Option<&'a [u8]> {
        let count = match plan {
            Plan::Fixed(size) => *size,
            Plan::Text | Plan::Bytes => usize::try_from(self.long()?).ok()?,
            _ => return None,
        };
        let found = self.take(count)?;
        if matches!(plan, Plan::Text) {
            std::str::from_utf8(found).ok()?;
        }
        Some(found)
    }

    /// Read a value into a column, or past it.
    fn read(&mut self, plan: &Plan, column: Option<&mut Column>) -> Option<()> {
        match plan {
            Plan::Union(branches) => {
                let branch = self.index(branches)?;
                return self.read(branch, column);
            }
            Plan::Record(fields) => return self.record(fields, column),
            Plan::Array(item) => return self.blocks(None, item, column),
            Plan::Map(item) => return self.blocks(Some(&Plan::Text), item, column),
            Plan::Fail => return None,
            _ => {}
        }
        let Some(column) = column else {
            return self.skip(plan);
        };
        match plan {
            Plan::Null => column.null(),
            Plan::Boolean => {
                let byte = self.take(1)?[0];
                if byte > 1 {
                    None
                } else {
                    column.bool(byte == 1)
                }
            }
            Plan::Int | Plan::Long => column.int(self.whole(plan)?),
            Plan::Float => {
                let value = f32::from_le_bytes(self.take(4)?.try_into().ok()?);
                // The reference's conversions change a signalling NaN.
                let odd = value.is_nan() && value.to_bits() << 1 != f32::NAN.to_bits() << 1;
                if odd {
                    None
                } else {
                    column.float(f64::from(value))
                }
            }
            Plan::Double => column.float(f64::from_le_bytes(self.take(8)?.try_into().ok()?)),
            Plan::Text | Plan::Bytes | Plan::Fixed(_) => {
                let found = self.bytes(plan)?;
                if column.kind == Kind::Text && matches!(plan, Plan::Bytes) {
                    std::str::from_utf8(found).ok()?;
                }
                column.bytes(found)
            }
            Plan::Scaled(inner, unit) => {
                let number = self.whole(inner)?;
                let scaled = match *unit {
                    1.. => number.checked_mul(*unit)?,
                    _ => number.checked_div_euclid(unit.checked_neg()?)?,
                };
                column.int(scaled)
            }
            Plan::Decimal(inner) => column.decimal(unscaled(self.bytes(inner)?)?),
            Plan::Enum(symbols) => column.bytes(self.index(symbols)?.as_ref()?.as_bytes()),
            Plan::Whole(value) => column.int(*value),
            Plan::Real(value) => column.float(*value),
            Plan::Flag(value) => column.bool(*value),
            Plan::Given(value) => column.bytes(value),
            _ => None,
        }
    }

    /// Read past a value, as strictly as the reference does.
    fn skip(&mut self, plan: &Plan) -> Option<()> {
        match plan {
            Plan::Null => {}
            Plan::Boolean => _ = self.take(1).filter(|byte| byte[0] <= 1)?,
            Plan::Int | Plan::Long => _ = self.whole(plan)?,
            Plan::Float => _ = self.take(4)?,
            Plan::Double => _ = self.take(8)?,
            Plan::Enum(symbols) => _ = self.index(symbols)?.as_ref()?,
            _ => _ = self.bytes(plan)?,
        }
        Some(())
    }

    fn record(
        &mut self,
        fields: &[(Arc<Plan>, Option<usize>)],
        mut column: Option<&mut Column>,
    ) -> Option<()> {
        for (step, slot) in fields {
            let child = match (&mut column, slot) {
                (Some(column), Some(slot)) => Some(column.children.get_mut(*slot)?),
                _ => None,
            };
            self.read(step, child)?;
        }
        let Some(column) = column else {
            return Some(());
        };
        let rows = column.len() + 1;
        column
            .children
            .iter()
            .all(|child| child.len() == rows)
            .then_some(())?;
        column.mark()
    }

    /// The blocks of an array, or with `key` of a map, up to the empty one.
    fn blocks(
        &mut self,
        key: Option<&Plan>,
        item: &Plan,
        mut column: Option<&mut Column>,
    ) -> Option<()> {
        loop {
            let mut count = self.long()?;
            if count == 0 {
                break;
            }
            let mut end = None;
            if count < 0 {
                let size = self.long()?;
                count = count.checked_neg()?;
                end = Some(i64::try_from(self.at).ok()?.checked_add(size)?);
            }
            if usize::try_from(count).ok()? > self.left() {
                return None;
            }
            for _ in 0..count {
                let before = self.at;
                let mut children = column.as_mut().map(|column| column.children.iter_mut());
                if let Some(key) = key {
                    self.read(key, children.as_mut().and_then(Iterator::next))?;
                }
                self.read(item, children.as_mut().and_then(Iterator::next))?;
                self.empty += usize::from(self.at == before);
                if self.empty > self.data.len() {
                    return None;
                }
            }
            if end.is_some_and(|end| usize::try_from(end) != Ok(self.at)) {
                return None;
            }
        }
        match column {
            Some(map) if key.is_some() && map.repeats() => None, // the last of a key counts
            Some(column) => column.end(),
            None => Some(()),
        }
    }
}

/// A big-endian number of at most 16 bytes.
fn unscaled(bytes: &[u8]) -> Option<i128> {
    let negative = bytes.first().is_some_and(|byte| byte & 0x80 != 0);
    let mut number = if negative { [0xff; 16] } else { [0; 16] };
    number
        .get_mut(16usize.checked_sub(bytes.len())?..)?
        .copy_from_slice(bytes);
    Some(i128::from_be_bytes(number))
}

/// Add the row of a datum; after `None`, parts of it are in the column.
pub fn datum(data: &[u8], plan: &Plan, root: &mut Column) -> Option<()> {
    let mut datum = Datum {
        data,
        at: 0,
        empty: 0,
    };
    datum.read(plan, Some(root))?;
    (datum.left() == 0).then_some(())
}

/// Decode the datums that follow `head`; returns rows and unsure positions.
#[pyfunction]
fn avro_rows<'py>(
    py: Python<'py>,
    array: &Bound<'py, PyAny>,
    layout: &Bound<'py, PyAny>,
    plan: &Bound<'py, PyAny>,
    head: Vec<u8>,
) -> PyResult<Rows<'py>> {
    let (values, mut root, plan) = (Values::new(array)?, Column::new(layout)?, Plan::new(plan)?);
    let unsure = py.detach(|| {
        values.each(&mut root, |value, root| {
            let data = value.strip_prefix(head.as_slice())?;
            (!value.is_empty()).then_some(())?;
            datum(data, &plan, root)
        })
    });
    rows(py, root, &unsure)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(avro_rows, module)?)
}
