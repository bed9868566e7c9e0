//! Messages out of Arrow's memory into the queue of a producer.

use std::ffi::c_int;
use std::ptr::{null, null_mut};

use arrow_array::{Array, LargeBinaryArray};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::capsules::array_of;
use crate::rdkafka::{api, c_string, Handle, RawMessage};

const ANY: i32 = -1; // RD_KAFKA_PARTITION_UA: the partitioner decides
const COPY: c_int = 2; // RD_KAFKA_MSG_F_COPY: librdkafka copies the memory before the call returns
const EMPTY: &[u8] = b"\0"; // target of an empty value's pointer: a null pointer means null

/// Queue messages without headers, in order.
///
/// Returns the result of each, an `int32` of this machine; 0 for success.
///
/// Raises ValueError: the producer is closed, or the arrays do not have the same length.
#[pyfunction]
fn produce_batch<'py>(
    py: Python<'py>,
    library: &str,
    client: usize,
    topic: &str,
    key: &Bound<'py, PyAny>,
    value: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyBytes>> {
    let api = c_string(library).and_then(|path| api(&path)).map_err(PyValueError::new_err)?;
    let name = c_string(topic).map_err(PyValueError::new_err)?;
    let (key, value) = (binaries(key)?, binaries(value)?);
    if client == 0 || key.len() != value.len() {
        return Err(PyValueError::new_err("a closed producer, or columns of different lengths"));
    }
    let queued: Result<_, &str> = py.detach(|| {
        let mut messages: Vec<RawMessage> =
            (0..value.len()).map(|row| message(&key, &value, row)).collect();
        let count = c_int::try_from(messages.len()).map_err(|_| "too many messages")?;
        unsafe {
            let at = (api.topic_new)(client as Handle, name.as_ptr(), null_mut());
            if at.is_null() {
                let code = (api.last_error)(); // the topic's name is invalid
                messages.iter_mut().for_each(|one| one.err = code);
                return Ok(results(&messages));
            }
            (api.produce_batch)(at, ANY, COPY, messages.as_mut_ptr(), count);
            (api.topic_destroy)(at);
        }
        Ok(results(&messages))
    });
    Ok(PyBytes::new(py, &queued.map_err(PyValueError::new_err)?))
}

fn results(messages: &[RawMessage]) -> Vec<u8> {
    messages.iter().flat_map(|one| one.err.to_ne_bytes()).collect()
}

fn binaries(object: &Bound<'_, PyAny>) -> PyResult<LargeBinaryArray> {
    let array = array_of(object)?;
    let found = array.as_any().downcast_ref::<LargeBinaryArray>();
    found.cloned().ok_or_else(|| PyTypeError::new_err("no array of large binaries"))
}

fn message(key: &LargeBinaryArray, value: &LargeBinaryArray, row: usize) -> RawMessage {
    let (key, key_len) = pointer(key, row);
    let (payload, len) = pointer(value, row);
    RawMessage {
        err: 0,
        topic: null_mut(),
        partition: 0,
        payload,
        len,
        key,
        key_len,
        offset: 0,
        private: null_mut(),
    }
}

fn pointer(array: &LargeBinaryArray, row: usize) -> (*const u8, usize) {
    if array.is_null(row) {
        return (null(), 0);
    }
    match array.value(row) {
        [] => (EMPTY.as_ptr(), 0),
        bytes => (bytes.as_ptr(), bytes.len()),
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(produce_batch, module)?)
}
