//! JSON records to columns. A record that is not read with certainty is left to the reference.
//!
//! The rules are those of `oncely.decode.json.JsonDecoder`. `None` means "unsure" everywhere.

use crate::columns::{repeated, rows, Column, Kind, Rows, Values};
use crate::times;
use base64::engine::general_purpose::STANDARD;
use base64::Engine;
use pyo3::prelude::*;

/// Nesting that is read here; the rule's own limit is 128.
const DEEPEST: usize = 100;
const EXACT_POWERS: [f64; 23] = [
    1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16,
    1e17, 1e18, 1e19, 1e20, 1e21, 1e22,
];

#[derive(Clone, Copy)]
pub struct Rules {
    pub strict: bool,
    pub rounding: bool,
}

/// A number of JSON's grammar; `mantissa` has all of its digits if `exact`.
struct Number<'a> {
    text: &'a [u8],
    negative: bool,
    mantissa: u64,
    exact: bool,
    fraction: usize,
    whole: bool,
    exponent: bool,
}

struct Parser<'a> {
    data: &'a [u8], // UTF-8
    at: usize,
    rules: Rules,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<u8> {
        self.data.get(self.at).copied()
    }

    /// The next byte after white space.
    fn token(&mut self) -> Option<u8> {
        while matches!(self.peek()?, b' ' | b'\n' | b'\r' | b'\t') {
            self.at += 1;
        }
        self.peek()
    }

    fn expect(&mut self, byte: u8) -> Option<()> {
        (self.token()? == byte).then(|| self.at += 1)
    }

    fn literal(&mut self, text: &[u8]) -> Option<()> {
        self.data[self.at..]
            .starts_with(text)
            .then(|| self.at += text.len())
    }

    /// After an opening bracket: true if the closing one follows.
    fn is_empty(&mut self, close: u8) -> Option<bool> {
        let empty = self.token()? == close;
        self.at += usize::from(empty);
        Some(empty)
    }

    /// After an item: true for a comma, false for the closing bracket.
    fn goes_on(&mut self, close: u8) -> Option<bool> {
        let byte = self.token()?;
        self.at += 1;
        if byte == b',' {
            Some(true)
        } else {
            (byte == close).then_some(false)
        }
    }

    /// A text after its opening quote, without escapes in `scratch`.
    fn text<'s>(&mut self, scratch: &'s mut Vec<u8>) -> Option<&'s [u8]>
    where
        'a: 's,
    {
        let from = self.at;
        if self.plain()? == b'"' {
            let plain: &'a [u8] = &self.data[from..self.at];
            self.at += 1;
            return Some(plain);
        }
        scratch.clear();
        scratch.extend_from_slice(&self.data[from..self.at]);
        loop {
            self.at += 1;
            self.escape(scratch)?;
            let from = self.at;
            let end = self.plain()?;
            scratch.extend_from_slice(&self.data[from..self.at]);
            if end == b'"' {
                self.at += 1;
                return Some(scratch);
            }
        }
    }

    /// Skip to the next quote or backslash, and return it.
    fn plain(&mut self) -> Option<u8> {
        const ONES: u64 = 0x0101_0101_0101_0101;
        const HIGH: u64 = 0x8080_8080_8080_8080;
        while let Some(eight) = self.data.get(self.at..self.at + 8) {
            let word = u64::from_le_bytes(eight.try_into().ok()?);
            let zero = |x: u64| x.wrapping_sub(ONES) & !x;
            let quote = zero(word ^ (ONES * u64::from(b'"')));
            let backslash = zero(word ^ (ONES * u64::from(b'\\')));
            let control = word.wrapping_sub(ONES * 0x20) & !word;
            let found = (quote | backslash | control) & HIGH;
            if found != 0 {
                self.at += found.trailing_zeros() as usize / 8;
                break;
            }
            self.at += 8;
        }
        loop {
            match self.peek()? {
                byte @ (b'"' | b'\\') => return Some(byte),
                0..=0x1f => return None,
                _ => self.at += 1,
            }
        }
    }

    /// An escape after its backslash.
    fn escape(&mut self, out: &mut Vec<u8>) -> Option<()> {
        let byte = self.peek()?;
        self.at += 1;
        out.push(match byte {
            b'"' | b'\\' | b'/' => byte,
            b'b' => 8,
            b'f' => 12,
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'u' => {
                let mut code = self.hex()?;
                if (0xd800..0xdc00).contains(&code) {
                    self.literal(b"\\u")?;
                    let low = self.hex()?.checked_sub(0xdc00).filter(|&low| low < 0x400)?;
                    code = 0x10000 + ((code - 0xd800) << 10) + low;
                }
                let mut utf8 = [0; 4];
                out.extend_from_slice(char::from_u32(code)?.encode_utf8(&mut utf8).as_bytes());
                return Some(());
            }
            _ => return None,
        });
        Some(())
    }

    fn hex(&mut self) -> Option<u32> {
        let digits = self.data.get(self.at..self.at + 4)?;
        self.at += 4;
        let digit = |code, &byte: &u8| Some(code << 4 | char::from(byte).to_digit(16)?);
        digits.iter().try_fold(0, digit)
    }

    fn number(&mut self) -> Option<Number<'a>> {
        let from = self.at;
        let negative = self.peek()? == b'-';
        self.at += usize::from(negative);
        let first = self.at;
        let (mut mantissa, mut exact) = (0u64, true);
        let mut fraction = 0;
        self.digits(&mut mantissa, &mut exact)?;
        if self.data[first] == b'0' && self.at > first + 1 {
            return None;
        }
        let mut whole = true;
        if self.peek() == Some(b'.') {
            self.at += 1;
            fraction = self.digits(&mut mantissa, &mut exact)?;
            whole = false;
        }
        let exponent = matches!(self.peek(), Some(b'e' | b'E'));
        if exponent {
            self.at += 1;
            self.at += usize::from(matches!(self.peek()?, b'+' | b'-'));
            self.digits(&mut 0, &mut true)?;
            whole = false;
        }
        let text = &self.data[from..self.at];
        Some(Number {
            text,
            negative,
            mantissa,
            exact,
            fraction,
            whole,
            exponent,
        })
    }

    /// One digit or more; returns their number.
    fn digits(&mut self, mantissa: &mut u64, exact: &mut bool) -> Option<usize> {
        let from = self.at;
        while let Some(byte @ b'0'..=b'9') = self.peek() {
            // Below this limit another digit fits.
            *exact &= *mantissa < u64::MAX / 10;
            *mantissa = mantissa
                .wrapping_mul(10)
                .wrapping_add(u64::from(byte - b'0'));
            self.at += 1;
        }
        (self.at > from).then_some(self.at - from)
    }

    /// Check any value; with `out`, write it without spaces.
    fn any(&mut self, depth: usize, out: &mut Option<&mut Vec<u8>>) -> Option<()> {
        let from = self.at;
        match self.peek()? {
            b'"' => return self.any_text(out),
            b'{' | b'[' => return self.any_inside(depth + 1, out),
            b't' => self.literal(b"true")?,
            b'f' => self.literal(b"false")?,
            b'n' => self.literal(b"null")?,
            _ => _ = self.number()?,
        }
        write(out, &self.data[from..self.at])
    }

    fn any_text(&mut self, out: &mut Option<&mut Vec<u8>>) -> Option<()> {
        let from = self.at;
        self.at += 1;
        let mut scratch = vec![];
        let text = self.text(&mut scratch)?;
        if text.len() == self.at - from - 2 {
            return write(out, &self.data[from..self.at]); // it has no escapes
        }
        write(out, b"\"")?;
        for &byte in text {
            match byte {
                b'"' | b'\\' => write(out, &[b'\\', byte])?,
                8 => write(out, b"\\b")?,
                12 => write(out, b"\\f")?,
                b'\n' => write(out, b"\\n")?,
                b'\r' => write(out, b"\\r")?,
                b'\t' => write(out, b"\\t")?,
                0..=0x1f => write(out, format!("\\u{byte:04x}").as_bytes())?,
                _ => write(out, &[byte])?,
            }
        }
        write(out, b"\"")
    }

    fn any_inside(&mut self, depth: usize, out: &mut Option<&mut Vec<u8>>) -> Option<()> {
        let open = self.peek()?;
        let close = open + 2;
        self.at += 1;
        write(out, &[open])?;
        let mut keys = vec![];
        let mut more = depth <= DEEPEST && !self.is_empty(close)?;
        while more {
            if open == b'{' {
                (self.token()? == b'"').then_some(())?;
                let from = out.as_ref().map_or(0, |out| out.len());
                self.any_text(out)?;
                keys.push(from..out.as_ref().map_or(0, |out| out.len()));
                self.expect(b':')?;
                write(out, b":")?;
            }
            self.token()?;
            self.any(depth, out)?;
            more = self.goes_on(close)?;
            write(out, if more { b"," } else { b"" })?;
        }
        if let Some(out) = out {
            if repeated(keys.into_iter().map(|key| &out[key]).collect()) {
                return None;
            }
        }
        (depth <= DEEPEST).then_some(())?;
        write(out, &[close])
    }

    /// A value for a column; `scratch` is for texts with escapes.
    fn value(&mut self, column: &mut Column, depth: usize, scratch: &mut Vec<u8>) -> Option<()> {
        let (first, from) = (self.token()?, self.at);
        if first == b'n' {
            self.literal(b"null")?;
            return column.null();
        }
        if column.kind == Kind::Json {
            self.any(depth, &mut Some(column.open()))?;
            return column.end();
        }
        match first {
            b'"' => {
                self.at += 1;
                let text = self.text(scratch)?;
                text_value(text, column, self.rules)
            }
            b'{' if column.kind == Kind::Map => self.map(column, depth + 1, scratch),
            b'{' => self.members(column, depth + 1, scratch),
            b'[' => self.list(column, depth + 1, scratch),
            b't' | b'f' => {
                self.literal(if first == b't' { b"true" } else { b"false" })?;
                if column.kind == Kind::Text && !self.rules.strict {
                    return column.bytes(&self.data[from..self.at]);
                }
                column.bool(first == b't')
            }
            _ => {
                let number = self.number()?;
                number_value(&number, column, self.rules)
            }
        }
    }

    fn members(&mut self, column: &mut Column, depth: usize, scratch: &mut Vec<u8>) -> Option<()> {
        (column.kind == Kind::Struct && depth <= DEEPEST).then_some(())?;
        self.at += 1;
        let rows = column.len();
        let mut guess = 0;
        let mut more = !self.is_empty(b'}')?;
        while more {
            self.expect(b'"')?;
            let found = column.find(self.text(scratch)?, guess);
            self.expect(b':')?;
            if let Some(index) = found {
                let child = &mut column.children[index];
                (child.len() == rows).then_some(())?; // of a repeated name the last counts
                self.value(child, depth, scratch)?;
                guess = index + 1;
            } else {
                self.token()?;
                self.any(depth, &mut None)?;
            }
            more = self.goes_on(b'}')?;
        }
        for child in &mut column.children {
            if child.len() == rows {
                child.null()?;
            }
        }
        column.mark()
    }

    fn list(&mut self, column: &mut Column, depth: usize, scratch: &mut Vec<u8>) -> Option<()> {
        (column.kind == Kind::List && depth <= DEEPEST).then_some(())?;
        self.at += 1;
        let mut more = !self.is_empty(b']')?;
        while more {
            self.value(&mut column.children[0], depth, scratch)?;
            more = self.goes_on(b']')?;
        }
        column.end()
    }

    fn map(&mut self, column: &mut Column, depth: usize, scratch: &mut Vec<u8>) -> Option<()> {
        (depth <= DEEPEST).then_some(())?;
        self.at += 1;
        let mut more = !self.is_empty(b'}')?;
        while more {
            self.expect(b'"')?;
            column.children[0].bytes(self.text(scratch)?)?;
            self.expect(b':')?;
            self.value(&mut column.children[1], depth, scratch)?;
            more = self.goes_on(b'}')?;
        }
        if column.repeats() {
            None
        } else {
            column.end()
        }
    }
}

fn write(out: &mut Option<&mut Vec<u8>>, bytes: &[u8]) -> Option<()> {
    if let Some(out) = out {
        out.extend_from_slice(bytes);
    }
    Some(())
}

fn text_value(text: &[u8], column: &mut Column, rules: Rules) -> Option<()> {
    match column.kind {
        Kind::Text => column.bytes(text),
        Kind::Decimal { scale, .. } => column.decimal(plain_decimal(text, scale)?),
        Kind::Date => column.int(times::date(text)?),
        Kind::Binary => {
            // The engine is strict: padding, and no bits beyond the bytes.
            STANDARD.decode_vec(text, column.open()).ok()?;
            column.end()
        }
        Kind::Timestamp { zoned } => column.int(times::timestamp(text, zoned, rules.rounding)?),
        _ => None,
    }
}

fn number_value(number: &Number, column: &mut Column, rules: Rules) -> Option<()> {
    match column.kind {
        Kind::Text if !rules.strict => column.bytes(number.text),
        Kind::Int(_) if number.whole && number.exact => {
            let value = i128::from(number.mantissa);
            let value = if number.negative { -value } else { value };
            column.int(i64::try_from(value).ok()?)
        }
        Kind::Float(width) => {
            let value = double(number)?;
            let stored = if width == 4 {
                f64::from(value as f32)
            } else {
                value
            };
            // Zero of another number: it is too close to 0.
            let lost = stored == 0.0 && !(number.exact && number.mantissa == 0);
            if stored.is_finite() && !lost {
                column.float(value)
            } else {
                None
            }
        }
        Kind::Decimal { scale, .. } => column.decimal(plain_decimal(number.text, scale)?),
        _ => None,
    }
}

fn double(number: &Number) -> Option<f64> {
    if number.whole && number.exact && number.mantissa == 0 {
        return Some(0.0); // a whole -0 has no sign
    }
    if number.exact && !number.exponent && number.mantissa <= 1 << 53 && number.fraction <= 22 {
        // Both operands are exact, so the quotient is rounded once.
        let value = number.mantissa as f64 / EXACT_POWERS[number.fraction];
        return Some(if number.negative { -value } else { value });
    }
    std::str::from_utf8(number.text).ok()?.parse().ok()
}

/// A decimal number without exponent, times ten to the scale.
fn plain_decimal(text: &[u8], scale: u32) -> Option<i128> {
    let negative = text.first() == Some(&b'-');
    let digits = text
        .strip_prefix(b"-")
        .or(text.strip_prefix(b"+"))
        .unwrap_or(text);
    let mut parts = digits.splitn(2, |&byte| byte == b'.');
    let (whole, fraction) = (parts.next()?, parts.next());
    if text.len() > 38 || whole.is_empty() || fraction.is_some_and(<[u8]>::is_empty) {
        return None;
    }
    let fraction = fraction.unwrap_or_default();
    let kept = fraction.len().min(scale as usize);
    let mut value = 0i128;
    for byte in whole.iter().chain(&fraction[..kept]) {
        let digit = byte.is_ascii_digit().then(|| i128::from(byte - b'0'))?;
        value = value.checked_mul(10)?.checked_add(digit)?;
    }
    if fraction[kept..].iter().any(|&byte| byte != b'0') {
        return None;
    }
    value = value.checked_mul(10i128.checked_pow(scale - kept as u32)?)?;
    Some(if negative { -value } else { value })
}

/// Add the row of a record; after `None`, parts of it are in the column.
pub fn record(data: &[u8], root: &mut Column, rules: Rules, scratch: &mut Vec<u8>) -> Option<()> {
    std::str::from_utf8(data).ok()?;
    let mut parser = Parser { data, at: 0, rules };
    (parser.token()? == b'{').then_some(())?;
    parser.value(root, 0, scratch)?;
    parser.token().is_none().then_some(())
}

/// Decode an array of records by the layout of a struct; returns rows and unsure positions.
#[pyfunction]
fn json_rows<'py>(
    py: Python<'py>,
    array: &Bound<'py, PyAny>,
    layout: &Bound<'py, PyAny>,
    strict: bool,
    rounding: bool,
) -> PyResult<Rows<'py>> {
    let (values, mut root) = (Values::new(array)?, Column::new(layout)?);
    let rules = Rules { strict, rounding };
    let unsure = py.detach(|| {
        let mut scratch = vec![];
        values.each(&mut root, |data, root| {
            record(data, root, rules, &mut scratch)
        })
    });
    rows(py, root, &unsure)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(json_rows, module)?)
}
