//! What `corpus.py prepare` writes: a list in Python's syntax.

use pyo3::prelude::*;

/// One of each item of the file that the environment variable ONCELY_GIVEN names.
pub fn each<T>(make: impl Fn(&Bound<'_, PyAny>) -> PyResult<T>) -> Vec<T> {
    let path = std::env::var("ONCELY_GIVEN").expect("ONCELY_GIVEN names a file");
    let text = std::fs::read_to_string(path).expect("a readable file");
    Python::attach(|py| {
        let items = py.import("ast")?.call_method1("literal_eval", (text,))?;
        items.try_iter()?.map(|item| make(&item?)).collect::<PyResult<_>>()
    })
    .unwrap_or_else(|error| panic!("{error}"))
}
