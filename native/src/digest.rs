//! Digests of rows, as `oncely.core.digest` computes them: PostgreSQL's hash functions.
//!
//! The kinds of columns, and what is hashed of a value, are described there. A column of a kind
//! that is not computed here is left to the reference.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Date32Type, Decimal128Type, Float64Type, Int32Type, Int64Type, Time64MicrosecondType,
    TimestampMicrosecondType, UInt64Type,
};
use arrow_array::{Array, ArrayRef, ArrowPrimitiveType};
use arrow_schema::DataType;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use sha2::{Digest, Sha256};

use crate::capsules::array_of;

/// Bytes of text that are hashed as they are; longer ones are replaced by their SHA-256 as text.
const LONGEST: usize = 240;
/// Microseconds from 1970 to 2000.
const EPOCH_2000: i64 = 946_684_800_000_000;

type State = (u32, u32, u32);

fn mix((mut a, mut b, mut c): State) -> State {
    for by in [4, 6, 8, 16, 19, 4] {
        a = a.wrapping_sub(c) ^ c.rotate_left(by);
        c = c.wrapping_add(b);
        (a, b, c) = (b, c, a);
    }
    (a, b, c)
}

fn finish((mut a, mut b, mut c): State) -> u64 {
    for by in [14, 11, 25, 16, 4, 14, 24] {
        c = (c ^ b).wrapping_sub(b.rotate_left(by));
        (a, b, c) = (b, c, a);
    }
    u64::from(a) << 32 | u64::from(b)
}

fn begin(length: usize, seed: u64) -> State {
    let base = 0x9e37_79b9_u32.wrapping_add(length as u32).wrapping_add(3_923_095);
    if seed == 0 {
        return (base, base, base);
    }
    mix((base.wrapping_add((seed >> 32) as u32), base.wrapping_add(seed as u32), base))
}

/// `hash_uint32_extended`
fn hash_u32(value: u32, seed: u64) -> u64 {
    let (a, b, c) = begin(4, seed);
    finish((a.wrapping_add(value), b, c))
}

/// The 32 bits that the hash function of `bigint` is given: an integer's own, if it fits.
fn folded(value: i64) -> u32 {
    (value as u32) ^ ((value >> 32) as u32) ^ ((value >> 63) as u32)
}

/// `hash_bytes_extended`
fn hash_bytes(mut data: &[u8], seed: u64) -> u64 {
    let mut state = begin(data.len(), seed);
    let word = |part: &[u8]| {
        let mut whole = [0; 4];
        whole[..part.len()].copy_from_slice(part);
        u32::from_le_bytes(whole)
    };
    let add = |(a, b, c): State, part: &[u8], shift: u32| {
        let at = |from: usize| word(&part[from.min(part.len())..(from + 4).min(part.len())]);
        (a.wrapping_add(at(0)), b.wrapping_add(at(4)), c.wrapping_add(at(8) << shift))
    };
    while let Some((first, rest)) = data.split_at_checked(12) {
        state = mix(add(state, first, 0));
        data = rest;
    }
    finish(add(state, data, 8)) // the lowest byte of the last word is kept for the length
}

fn hash_text(text: &[u8], seed: u64) -> u64 {
    if text.len() <= LONGEST {
        return hash_bytes(text, seed);
    }
    hash_bytes(&hexadecimal(&Sha256::digest(text)), seed)
}

/// Bytes are hashed as hexadecimal text.
fn hash_binary(data: &[u8], seed: u64) -> u64 {
    if data.len() <= LONGEST / 2 {
        return hash_bytes(&hexadecimal(data), seed);
    }
    hash_bytes(&hexadecimal(&Sha256::digest(data)), seed)
}

fn hexadecimal(data: &[u8]) -> Vec<u8> {
    let digit = |one: u8| b"0123456789abcdef"[usize::from(one)];
    data.iter().flat_map(|one| [digit(one >> 4), digit(one & 15)]).collect()
}

fn hash_float(value: f64, seed: u64) -> u64 {
    if value == 0.0 {
        return seed; // PostgreSQL does not hash zero, which may be negative
    }
    let known = if value.is_nan() { f64::from_bits(0x7ff8_0000_0000_0000) } else { value };
    hash_bytes(&known.to_le_bytes(), seed)
}

/// XOR a column's hashes into the contents of the rows; a null is not there.
fn each<T>(
    column: &dyn Array,
    to: &mut [u64],
    value: impl Fn(usize) -> T,
    hash: impl Fn(T) -> u64,
) {
    for (row, to) in to.iter_mut().enumerate() {
        if column.is_valid(row) {
            *to ^= hash(value(row));
        }
    }
}

fn numbers<P: ArrowPrimitiveType>(
    column: &ArrayRef,
    to: &mut [u64],
    hash: impl Fn(P::Native) -> u64,
) {
    let values = column.as_primitive::<P>().values();
    each(column, to, |row| values[row], hash);
}

/// False: the kind, with this type, is left to the reference.
fn add_column(column: &ArrayRef, kind: &str, k: u64, to: &mut [u64]) -> bool {
    let int = |value: i32| hash_u32(value as u32, k);
    let micros = |value: i64| hash_u32(folded(value), k);
    match (kind, column.data_type()) {
        ("boolean", DataType::Boolean) => {
            let values = column.as_boolean();
            each(column, to, |row| i32::from(values.value(row)), int);
        }
        ("integer", DataType::Int32) => numbers::<Int32Type>(column, to, int),
        ("date", DataType::Date32) => numbers::<Date32Type>(column, to, int),
        // The number is the seed, and the lower half of the constant is hashed.
        ("bigint", DataType::Int64) => {
            numbers::<Int64Type>(column, to, |value| hash_u32(k as u32, value as u64));
        }
        ("decimal", DataType::Decimal128(..)) => {
            numbers::<Decimal128Type>(column, to, |value| hash_u32(k as u32, value as u64));
        }
        ("float", DataType::Float64) => {
            numbers::<Float64Type>(column, to, |value| hash_float(value, k));
        }
        ("time", DataType::Time64(_)) => numbers::<Time64MicrosecondType>(column, to, micros),
        ("timestamp" | "instant", DataType::Timestamp(..)) => {
            numbers::<TimestampMicrosecondType>(column, to, |value| {
                micros(value.wrapping_sub(EPOCH_2000))
            });
        }
        ("text" | "stored", DataType::Utf8) => {
            let values = column.as_string::<i32>();
            each(column, to, |row| values.value(row).as_bytes(), |text| hash_text(text, k));
        }
        ("raw", DataType::LargeBinary) => {
            let values = column.as_binary::<i64>();
            each(column, to, |row| values.value(row), |text| hash_text(text, k));
        }
        ("bytes", DataType::Binary) => {
            let values = column.as_binary::<i32>();
            each(column, to, |row| values.value(row), |data| hash_binary(data, k));
        }
        _ => return false,
    }
    true
}

/// The content of each row, an `uint64` of this machine: XOR of the values of its columns.
///
/// `columns`: a record batch. `kinds` and `constants`: of each column.
///
/// Returns the contents, and the indices of columns that are not in them.
#[pyfunction]
fn row_contents<'py>(
    py: Python<'py>,
    columns: &Bound<'py, PyAny>,
    kinds: Vec<String>,
    constants: Vec<u64>,
) -> PyResult<(Bound<'py, PyBytes>, Vec<usize>)> {
    let rows = array_of(columns)?;
    let rows = rows.as_struct_opt().ok_or_else(|| PyValueError::new_err("not a record batch"))?;
    if rows.num_columns() != kinds.len() || kinds.len() != constants.len() {
        return Err(PyValueError::new_err("a kind and a constant of each column"));
    }
    let (contents, left) = py.detach(|| {
        let mut contents = vec![0; rows.len()];
        let left: Vec<usize> = (0..kinds.len())
            .filter(|&at| !add_column(rows.column(at), &kinds[at], constants[at], &mut contents))
            .collect();
        (contents, left)
    });
    Ok((bytes(py, &contents), left))
}

/// The digest of each row, in the same form. `offsets`: of their records, `int64`, or None.
#[pyfunction]
fn row_digests<'py>(
    py: Python<'py>,
    contents: &Bound<'py, PyAny>,
    offsets: Option<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyBytes>> {
    let contents = array_of(contents)?;
    let offsets = offsets.map(|one| array_of(&one)).transpose()?;
    let unfit = || PyValueError::new_err("contents of 64 bits, and as many offsets");
    let contents = contents.as_primitive_opt::<UInt64Type>().ok_or_else(unfit)?.values();
    let offsets = match &offsets {
        Some(array) => Some(array.as_primitive_opt::<Int64Type>().ok_or_else(unfit)?.values()),
        None => None,
    };
    if offsets.is_some_and(|some| some.len() != contents.len()) {
        return Err(unfit());
    }
    let digests: Vec<u64> = py.detach(|| match offsets {
        Some(some) => {
            contents.iter().zip(some).map(|(&one, &at)| hash_u32(folded(at), one)).collect()
        }
        None => contents.iter().map(|&one| hash_u32(0, one)).collect(),
    });
    Ok(bytes(py, &digests))
}

fn bytes<'py>(py: Python<'py>, numbers: &[u64]) -> Bound<'py, PyBytes> {
    let all: Vec<u8> = numbers.iter().flat_map(|one| one.to_ne_bytes()).collect();
    PyBytes::new(py, &all)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(row_contents, module)?)?;
    module.add_function(wrap_pyfunction!(row_digests, module)?)
}
