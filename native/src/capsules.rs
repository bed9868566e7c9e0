//! Arrow's C data interface in capsules, as Python libraries of Arrow exchange columns.

use arrow_array::ffi::{from_ffi, to_ffi, FFI_ArrowArray, FFI_ArrowSchema};
use arrow_array::{make_array, Array, ArrayRef, RecordBatch, StructArray};
use arrow_schema::ArrowError;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

/// Columns of equal length: `pyarrow.record_batch(columns)` takes them without a copy.
#[pyclass(frozen, module = "oncely_native")]
pub struct Columns(StructArray);

impl From<RecordBatch> for Columns {
    fn from(batch: RecordBatch) -> Self {
        Columns(batch.into())
    }
}

#[pymethods]
impl Columns {
    fn __len__(&self) -> usize {
        self.0.len()
    }

    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyCapsule>, Bound<'py, PyCapsule>)> {
        drop(requested_schema); // the interface allows any other schema
        let (array, schema) = to_ffi(&self.0.to_data()).map_err(invalid)?;
        Ok((
            PyCapsule::new_with_value(py, schema, c"arrow_schema")?,
            PyCapsule::new_with_value(py, array, c"arrow_array")?,
        ))
    }
}

/// An array of another library of Arrow, without a copy.
pub fn array_of(object: &Bound<'_, PyAny>) -> PyResult<ArrayRef> {
    let exported = object.call_method0("__arrow_c_array__")?;
    let (schema, array): (Bound<'_, PyCapsule>, Bound<'_, PyCapsule>) = exported.extract()?;
    let schema = schema.pointer_checked(Some(c"arrow_schema"))?.cast::<FFI_ArrowSchema>();
    let array = array.pointer_checked(Some(c"arrow_array"))?.cast::<FFI_ArrowArray>();
    // Safety: the names of the capsules tell their contents; the array is moved out of its capsule.
    let data = unsafe { from_ffi(FFI_ArrowArray::from_raw(array.as_ptr()), schema.as_ref()) };
    Ok(make_array(data.map_err(invalid)?))
}

pub fn invalid(error: ArrowError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Columns>()
}
