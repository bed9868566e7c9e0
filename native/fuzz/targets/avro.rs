//! A datum of Avro, read twice; the first byte chooses schemas.
#![no_main]
#![allow(dead_code)]

#[path = "../../src/avro.rs"]
mod avro;
#[path = "../../src/columns.rs"]
mod columns;
mod given;

use avro::Plan;
use columns::Column;
use libfuzzer_sys::fuzz_target;
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, OnceLock};

static READERS: OnceLock<Mutex<Vec<(Column, Arc<Plan>)>>> = OnceLock::new();

fn reader(pair: &Bound<'_, PyAny>) -> PyResult<(Column, Arc<Plan>)> {
    Ok((Column::new(&pair.get_item(0)?)?, Plan::new(&pair.get_item(1)?)?))
}

fuzz_target!(|input: &[u8]| {
    let Some((&choice, data)) = input.split_first() else { return };
    let mut readers = READERS.get_or_init(|| Mutex::new(given::each(reader))).lock().unwrap();
    let of = usize::from(choice) % readers.len();
    let (root, plan) = &mut readers[of];
    for _ in 0..2 {
        columns::or_cut(root, |root| avro::datum(data, plan, root));
    }
    root.truncate(0);
});
