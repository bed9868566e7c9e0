//! Rows as JSON objects, as `oncely.kinds.kafka.format` writes them with msgspec.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Float32Type, Float64Type, Int16Type, Int32Type, Int64Type, Int8Type, UInt16Type, UInt32Type,
    UInt64Type, UInt8Type,
};
use arrow_array::{Array, ArrayRef, LargeBinaryArray, RecordBatch, StructArray};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{DataType, Field, Schema};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::capsules::{array_of, invalid, Columns};

/// Appends the value of a row, which is not null.
type Writer<'a> = Box<dyn Fn(usize, &mut Vec<u8>) + Send + Sync + 'a>;

macro_rules! whole {
    ($column:ident, $kind:ty) => {{
        let values = $column.as_primitive::<$kind>().values();
        Box::new(move |row, to| {
            to.extend_from_slice(itoa::Buffer::new().format(values[row]).as_bytes());
        })
    }};
}

/// None: values of this type are not written here.
fn writer(column: &ArrayRef) -> Option<Writer<'_>> {
    Some(match column.data_type() {
        DataType::Boolean => {
            let values = column.as_boolean();
            Box::new(move |row, to| {
                to.extend_from_slice(if values.value(row) { b"true" } else { b"false" });
            })
        }
        DataType::Int8 => whole!(column, Int8Type),
        DataType::Int16 => whole!(column, Int16Type),
        DataType::Int32 => whole!(column, Int32Type),
        DataType::Int64 => whole!(column, Int64Type),
        DataType::UInt8 => whole!(column, UInt8Type),
        DataType::UInt16 => whole!(column, UInt16Type),
        DataType::UInt32 => whole!(column, UInt32Type),
        DataType::UInt64 => whole!(column, UInt64Type),
        DataType::Float32 => {
            let values = column.as_primitive::<Float32Type>().values();
            Box::new(move |row, to| float(f64::from(values[row]), to))
        }
        DataType::Float64 => {
            let values = column.as_primitive::<Float64Type>().values();
            Box::new(move |row, to| float(values[row], to))
        }
        DataType::Utf8 => {
            let values = column.as_string::<i32>();
            Box::new(move |row, to| text(values.value(row), to))
        }
        DataType::LargeUtf8 => {
            let values = column.as_string::<i64>();
            Box::new(move |row, to| text(values.value(row), to))
        }
        _ => return None,
    })
}

fn float(value: f64, to: &mut Vec<u8>) {
    to.extend_from_slice(match value {
        f64::INFINITY => b"\"Infinity\"",
        f64::NEG_INFINITY => b"\"-Infinity\"",
        _ if value.is_nan() => b"\"NaN\"",
        _ => return to.extend_from_slice(ryu::Buffer::new().format_finite(value).as_bytes()),
    });
}

fn text(value: &str, to: &mut Vec<u8>) {
    to.push(b'"');
    let (bytes, mut done) = (value.as_bytes(), 0);
    for (at, &byte) in bytes.iter().enumerate() {
        if byte >= b' ' && byte != b'"' && byte != b'\\' {
            continue;
        }
        to.extend_from_slice(&bytes[done..at]);
        done = at + 1;
        let short = match byte {
            b'"' | b'\\' => byte,
            b'\n' => b'n',
            b'\r' => b'r',
            b'\t' => b't',
            8 => b'b',
            12 => b'f',
            _ => {
                to.extend_from_slice(format!("\\u{byte:04x}").as_bytes());
                continue;
            }
        };
        to.extend_from_slice(&[b'\\', short]);
    }
    to.extend_from_slice(&bytes[done..]);
    to.push(b'"');
}

/// One object for each row, as a column `value` of large binaries.
///
/// `columns`: a record batch. None: a column's values are not written here.
#[pyfunction]
fn json_objects(py: Python<'_>, columns: &Bound<'_, PyAny>) -> PyResult<Option<Columns>> {
    let rows = array_of(columns)?;
    let rows = rows.as_struct_opt().ok_or_else(|| PyValueError::new_err("not a record batch"))?;
    let writers: Option<Vec<Writer<'_>>> = rows.columns().iter().map(writer).collect();
    let Some(writers) = writers else { return Ok(None) };
    let array = py.detach(|| objects(rows, &writers));
    let schema = Schema::new(vec![Field::new("value", DataType::LargeBinary, false)]);
    let batch = RecordBatch::try_new(Arc::new(schema), vec![Arc::new(array)]).map_err(invalid)?;
    Ok(Some(batch.into()))
}

fn objects(rows: &StructArray, writers: &[Writer<'_>]) -> LargeBinaryArray {
    let mut names: Vec<Vec<u8>> = Vec::new();
    for (at, field) in rows.fields().iter().enumerate() {
        let mut name = vec![if at == 0 { b'{' } else { b',' }];
        text(field.name(), &mut name);
        name.push(b':');
        names.push(name);
    }
    let mut data = Vec::new();
    let mut ends: Vec<i64> = vec![0];
    for row in 0..rows.len() {
        for ((name, column), write) in names.iter().zip(rows.columns()).zip(writers) {
            data.extend_from_slice(name);
            if column.is_valid(row) {
                write(row, &mut data);
            } else {
                data.extend_from_slice(b"null");
            }
        }
        data.push(b'}');
        ends.push(data.len() as i64);
    }
    LargeBinaryArray::new(OffsetBuffer::new(ends.into()), data.into(), None)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(json_objects, module)?)
}
