//! Records of JSON, a line each; the first byte chooses columns and rules.
#![no_main]
#![allow(dead_code)]

#[path = "../../src/columns.rs"]
mod columns;
mod given;
#[path = "../../src/json.rs"]
mod json;
#[path = "../../src/times.rs"]
mod times;

use columns::Column;
use libfuzzer_sys::fuzz_target;
use std::sync::{Mutex, OnceLock};

static ROOTS: OnceLock<Mutex<Vec<Column>>> = OnceLock::new();

fuzz_target!(|input: &[u8]| {
    let Some((&choice, records)) = input.split_first() else { return };
    let mut roots = ROOTS.get_or_init(|| Mutex::new(given::each(Column::new))).lock().unwrap();
    let of = usize::from(choice >> 2) % roots.len();
    let rules = json::Rules { strict: choice & 1 != 0, rounding: choice & 2 != 0 };
    let mut scratch = vec![];
    for data in records.split(|&byte| byte == b'\n') {
        columns::or_cut(&mut roots[of], |root| json::record(data, root, rules, &mut scratch));
    }
    roots[of].truncate(0);
});
