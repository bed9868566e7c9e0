//! The parts of Oncely that handle single records. Each file registers its own functions.

use pyo3::prelude::*;

mod avro;
mod capsules;
mod columns;
mod digest;
mod gather;
mod json;
mod json_lines;
mod produce;
mod rdkafka;
mod times;

#[pymodule]
fn oncely_native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    capsules::register(module)?;
    gather::register(module)?;
    produce::register(module)?;
    json::register(module)?;
    json_lines::register(module)?;
    digest::register(module)?;
    avro::register(module)
}
