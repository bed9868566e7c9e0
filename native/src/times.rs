//! ISO 8601 texts by the rule of `oncely.decode.times`; `None` means "unsure".

/// Days since 1970 of a text YYYY-MM-DD.
pub fn date(text: &[u8]) -> Option<i64> {
    if text.len() != 10 || text[4] != b'-' || text[7] != b'-' {
        return None;
    }
    let year = two(text, 0)? * 100 + two(text, 2)?;
    let (month, day) = (two(text, 5)?, two(text, 8)?);
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let last = match month {
        1 | 3 | 5 | 7 | 8 | 10 | 12 => 31,
        4 | 6 | 9 | 11 => 30,
        2 => 28 + i64::from(leap),
        _ => return None,
    };
    if year < 1 || !(1..=last).contains(&day) {
        return None;
    }
    // Years begin in March here, so that the day of a leap year is their last.
    let (year, month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let before = 365 * year + year / 4 - year / 100 + year / 400;
    Some(before + (153 * month + 2) / 5 + day - 1 - 719_468)
}

/// Microseconds since 1970: `date [(T|space) hh[:mm[:ss[.f{1,9}]]] [Z | (+|-)hh[[:]mm]]]`.
///
/// An offset needs `zoned`; with `rounding`, digits beyond microseconds are cut off.
pub fn timestamp(text: &[u8], zoned: bool, rounding: bool) -> Option<i64> {
    let days = date(text.get(..10)?)?;
    let mut rest = &text[10..];
    let mut seconds = days * 86_400;
    let mut micros = 0;
    if !rest.is_empty() {
        matches!(rest[0], b'T' | b' ').then_some(())?;
        rest = &rest[1..];
        seconds += limited(&mut rest, 23)? * 3600;
        if take(&mut rest, b':') {
            seconds += limited(&mut rest, 59)? * 60;
            if take(&mut rest, b':') {
                seconds += limited(&mut rest, 59)?;
                if take(&mut rest, b'.') {
                    micros = fraction(&mut rest, rounding)?;
                }
            }
        }
        if !rest.is_empty() {
            zoned.then_some(())?;
            seconds -= offset(rest)?;
        }
    }
    Some(seconds * 1_000_000 + micros)
}

fn fraction(rest: &mut &[u8], rounding: bool) -> Option<i64> {
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (found, after) = rest.split_at(digits);
    *rest = after;
    if !(1..=9).contains(&digits) || !rounding && found.iter().skip(6).any(|&b| b != b'0') {
        return None;
    }
    let six = found.iter().chain([b'0'; 6].iter()).take(6);
    Some(six.fold(0, |micros, byte| micros * 10 + i64::from(byte - b'0')))
}

/// An offset in seconds, to the text's end.
fn offset(mut rest: &[u8]) -> Option<i64> {
    if rest == b"Z" {
        return Some(0);
    }
    let sign = match *rest.first()? {
        b'+' => 1,
        b'-' => -1,
        _ => return None,
    };
    rest = &rest[1..];
    let mut minutes = limited(&mut rest, 23)? * 60;
    if !rest.is_empty() {
        take(&mut rest, b':');
        minutes += limited(&mut rest, 59)?;
    }
    rest.is_empty().then_some(sign * minutes * 60)
}

fn take(rest: &mut &[u8], byte: u8) -> bool {
    let found = rest.first() == Some(&byte);
    if found {
        *rest = &rest[1..];
    }
    found
}

/// Two digits at the start, and at most `most`.
fn limited(rest: &mut &[u8], most: i64) -> Option<i64> {
    let number = two(rest, 0)?;
    *rest = &rest[2..];
    (number <= most).then_some(number)
}

fn two(text: &[u8], at: usize) -> Option<i64> {
    let (tens, ones) = (
        text.get(at)?.wrapping_sub(b'0'),
        text.get(at + 1)?.wrapping_sub(b'0'),
    );
    (tens <= 9 && ones <= 9).then_some(i64::from(tens) * 10 + i64::from(ones))
}
