//! The records that a consumer has received, as Arrow columns.
//!
//! Each assigned partition has a queue of its own, which contains messages, ends and errors of the
//! partition. The consumer's common queue, which calls the callbacks of confluent-kafka, is served
//! by confluent-kafka's own `poll`; what arrives in it ends a wait here.

use std::collections::HashSet;
use std::ffi::CString;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_array::{
    ArrayRef, BinaryArray, Int32Array, Int64Array, ListArray, RecordBatch, StringArray,
    StructArray, TimestampMicrosecondArray,
};
use arrow_buffer::{Buffer, NullBufferBuilder, OffsetBuffer};
use arrow_schema::{ArrowError, DataType, Field, Fields, Schema};
use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;

use crate::capsules::{invalid, Columns};
use crate::rdkafka::{api, c_string, Api, Arrival, Common, Handle, Message, Queue};

/// The bytes of a header beside its name and its value.
const HEADER: usize = 16;
/// The name of a header whose own name is not UTF-8.
const UNREADABLE: &str = "\u{fffd}";
/// Offsets of binary columns have 32 bits.
const MOST: usize = i32::MAX as usize;

struct Bytes {
    data: Vec<u8>,
    ends: Vec<i32>,
    valid: NullBufferBuilder,
}

impl Bytes {
    fn new() -> Self {
        Bytes { data: Vec::new(), ends: vec![0], valid: NullBufferBuilder::new(0) }
    }

    fn push(&mut self, value: Option<&[u8]>) {
        self.data.extend_from_slice(value.unwrap_or_default());
        self.ends.push(self.data.len() as i32); // Rows bounds it by MOST
        self.valid.append(value.is_some());
    }

    fn parts(mut self) -> (OffsetBuffer<i32>, Buffer, Option<arrow_buffer::NullBuffer>) {
        (OffsetBuffer::new(self.ends.into()), self.data.into(), self.valid.finish())
    }

    fn binary(self) -> Result<ArrayRef, ArrowError> {
        let (ends, data, valid) = self.parts();
        Ok(Arc::new(BinaryArray::try_new(ends, data, valid)?))
    }

    fn string(self) -> Result<ArrayRef, ArrowError> {
        let (ends, data, valid) = self.parts();
        Ok(Arc::new(StringArray::try_new(ends, data, valid)?))
    }
}

struct Times {
    micros: Vec<i64>,
    valid: NullBufferBuilder,
}

impl Times {
    fn push(&mut self, milliseconds: Option<i64>) {
        // Nanoseconds as milliseconds, for example, are no time.
        let micros = milliseconds.and_then(|one| one.checked_mul(1000));
        self.micros.push(micros.unwrap_or(0));
        self.valid.append(micros.is_some());
    }

    fn finish(mut self) -> Result<ArrayRef, ArrowError> {
        let times = TimestampMicrosecondArray::try_new(self.micros.into(), self.valid.finish())?;
        Ok(Arc::new(times.with_timezone("UTC")))
    }
}

struct Headers {
    names: Bytes,
    values: Bytes,
    ends: Vec<i32>,
}

impl Headers {
    fn push(&mut self, message: &Message) {
        for (name, value) in message.headers() {
            self.names.push(Some(name.to_str().unwrap_or(UNREADABLE).as_bytes()));
            self.values.push(value);
        }
        self.ends.push(self.names.ends.len() as i32 - 1);
    }

    fn finish(self) -> Result<ArrayRef, ArrowError> {
        let fields = Fields::from(vec![
            Field::new("key", DataType::Utf8, true),
            Field::new("value", DataType::Binary, true),
        ]);
        let item = Field::new("item", DataType::Struct(fields.clone()), true);
        let columns = vec![self.names.string()?, self.values.binary()?];
        let pairs = StructArray::try_new(fields, columns, None)?;
        let ends = OffsetBuffer::new(self.ends.into());
        Ok(Arc::new(ListArray::try_new(Arc::new(item), ends, Arc::new(pairs), None)?))
    }
}

/// Bounds of what is returned at once.
struct Limits {
    rows: usize,
    bytes: usize,
}

/// Rows of the columns that are needed.
struct Rows {
    offset: Vec<i64>,
    leader_epoch: Vec<i32>,
    timestamp: Option<Times>,
    key: Option<Bytes>,
    value: Option<Bytes>,
    headers: Option<Headers>,
    bytes: usize,
}

impl Rows {
    fn new(needs: &HashSet<String>) -> Self {
        let needs = |name| needs.contains(name);
        Rows {
            offset: Vec::new(),
            leader_epoch: Vec::new(),
            timestamp: needs("timestamp")
                .then(|| Times { micros: Vec::new(), valid: NullBufferBuilder::new(0) }),
            key: needs("key").then(Bytes::new),
            value: needs("value").then(Bytes::new),
            headers: needs("headers").then(|| Headers {
                names: Bytes::new(),
                values: Bytes::new(),
                ends: vec![0],
            }),
            bytes: 0,
        }
    }

    fn len(&self) -> usize {
        self.offset.len()
    }

    /// An upper bound of the bytes that a message adds to a column.
    fn size(&self, message: &Message) -> usize {
        let headers = self.headers.iter().flat_map(|_| message.headers());
        let sizes = headers.map(|(name, value)| {
            // A name that is not UTF-8 becomes one of three bytes.
            HEADER + 3 + name.count_bytes() + value.map_or(0, <[u8]>::len)
        });
        message.len() + sizes.sum::<usize>()
    }

    fn push(&mut self, message: &Message, size: usize) {
        self.bytes += size;
        self.offset.push(message.offset());
        self.leader_epoch.push(message.leader_epoch());
        if let Some(column) = &mut self.timestamp {
            column.push(message.timestamp());
        }
        if let Some(column) = &mut self.key {
            column.push(message.key());
        }
        if let Some(column) = &mut self.value {
            column.push(message.value());
        }
        if let Some(column) = &mut self.headers {
            column.push(message);
        }
    }

    fn finish(self) -> Result<RecordBatch, ArrowError> {
        let mut columns: Vec<(&str, ArrayRef)> = vec![
            ("offset", Arc::new(Int64Array::from(self.offset))),
            ("leader_epoch", Arc::new(Int32Array::from(self.leader_epoch))),
        ];
        if let Some(column) = self.timestamp {
            columns.push(("timestamp", column.finish()?));
        }
        if let Some(column) = self.key {
            columns.push(("key", column.binary()?));
        }
        if let Some(column) = self.value {
            columns.push(("value", column.binary()?));
        }
        if let Some(column) = self.headers {
            columns.push(("headers", column.finish()?));
        }
        let field = |(name, column): &(&str, ArrayRef)| {
            Field::new(*name, column.data_type().clone(), true)
        };
        let fields: Vec<Field> = columns.iter().map(field).collect();
        let arrays = columns.into_iter().map(|(_, column)| column).collect();
        RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays)
    }
}

/// Index of the partition, code, offset and text of an error, or of an end of the partition.
type Event = (usize, i32, i64, String);

/// What has been taken: runs of rows, each with the index of its partition, and events.
struct Taken {
    rows: Rows,
    runs: Vec<(usize, usize)>,
    events: Vec<Event>,
}

/// Takes what a consumer of confluent-kafka has received of partitions that are assigned to it.
///
/// It is used by one thread, and closed before the consumer.
#[pyclass(module = "oncely_native")]
struct Gather {
    queues: Vec<Option<Queue>>, // dropped before the consumer
    common: Option<Common>,     // the same
    first: usize,
    mean: usize,
    needs: HashSet<String>,
    arrival: Arc<Arrival>,
    client: usize,
    api: &'static Api,
    _consumer: Py<PyAny>,
}

impl Gather {
    /// True if there was something.
    fn scan(&mut self, taken: &mut Taken, limits: &Limits) -> PyResult<bool> {
        let count = self.queues.len();
        for step in 0..count {
            let at = (self.first + step) % count;
            if let Some(queue) = &mut self.queues[at] {
                let before = taken.rows.len();
                let full = drain(queue, at, self.mean, taken, limits)?;
                if taken.rows.len() > before {
                    taken.runs.push((at, taken.rows.len() - before));
                }
                if full {
                    self.first = at + 1; // the next call begins with the next partition
                    break;
                }
            }
        }
        if taken.rows.len() > 0 {
            self.mean = taken.rows.bytes / taken.rows.len();
        }
        Ok(!taken.runs.is_empty() || !taken.events.is_empty())
    }
}

/// Take what a queue has; true if the limits are reached.
fn drain(
    queue: &mut Queue,
    at: usize,
    mean: usize,
    taken: &mut Taken,
    limits: &Limits,
) -> PyResult<bool> {
    loop {
        let rows = &mut taken.rows;
        let fit = (limits.bytes.saturating_sub(rows.bytes)) / mean.max(1);
        let Some(message) = queue.front(fit.min(limits.rows - rows.len())) else {
            return Ok(false);
        };
        if let Some(code) = message.error() {
            taken.events.push((at, code, message.offset(), message.text()));
        } else {
            let size = rows.size(message);
            if size > MOST {
                return Err(PyOverflowError::new_err("a record does not fit into a column"));
            }
            if rows.len() > 0 && rows.bytes + size > limits.bytes.min(MOST) {
                return Ok(true);
            }
            rows.push(message, size);
        }
        queue.pop();
        if taken.rows.len() >= limits.rows {
            return Ok(true);
        }
    }
}

#[pymethods]
impl Gather {
    /// `library`: the file of confluent-kafka's module; `client`: the `rd_kafka_t *` of `consumer`.
    #[new]
    fn new(library: &str, client: usize, consumer: Py<PyAny>) -> PyResult<Self> {
        let library = c_string(library).map_err(PyValueError::new_err)?;
        if client == 0 {
            return Err(PyValueError::new_err("the consumer is closed"));
        }
        let (api, arrival) = (api(&library).map_err(PyValueError::new_err)?, Arc::default());
        let common = unsafe { Common::open(api, client as Handle, &arrival) };
        Ok(Gather {
            queues: Vec::new(),
            common: Some(common.ok_or_else(|| PyValueError::new_err("not a consumer"))?),
            first: 0,
            mean: 0,
            needs: HashSet::new(),
            arrival,
            client,
            api,
            _consumer: consumer,
        })
    }

    /// Leaves all partitions. `needs`: the columns of those that are entered next.
    fn begin(&mut self, needs: HashSet<String>) {
        self.queues.clear();
        (self.first, self.needs) = (0, needs);
    }

    /// Called before a partition is assigned; the index by which `take` names it.
    fn enter(&mut self, topic: &str, partition: i32) -> PyResult<usize> {
        if self.client == 0 {
            return Err(PyValueError::new_err("the consumer is closed"));
        }
        let name: CString = c_string(topic).map_err(PyValueError::new_err)?;
        let client = self.client as Handle;
        let queue = unsafe { Queue::open(self.api, client, &name, partition, &self.arrival) };
        let refused = || PyValueError::new_err(format!("no queue of {topic}-{partition}"));
        let queue = Some(queue.ok_or_else(refused)?);
        let free = self.queues.iter().position(Option::is_none);
        let index = free.unwrap_or(self.queues.len());
        match self.queues.get_mut(index) {
            Some(place) => *place = queue,
            None => self.queues.push(queue),
        }
        Ok(index)
    }

    /// Called when a partition is not assigned any more; its index is given to another one.
    fn leave(&mut self, index: usize) {
        if let Some(queue) = self.queues.get_mut(index) {
            *queue = None;
        }
    }

    /// Called after a seek: drops what was taken out of librdkafka's queue before it.
    fn clear(&mut self, index: usize) {
        if let Some(Some(queue)) = self.queues.get_mut(index) {
            queue.clear();
        }
    }

    /// All that has arrived, up to about so many rows and bytes. Waits for it if there is nothing,
    /// until something arrives in the consumer's common queue.
    ///
    /// Returns columns; the index of a partition and the number of its rows, in the rows' order; and
    /// errors and ends of partitions: index, code, offset, text.
    ///
    /// Raises OverflowError: a record is larger than a column can be. Nothing is lost.
    fn take(
        &mut self,
        py: Python<'_>,
        seconds: f64,
        rows: usize,
        bytes: usize,
    ) -> PyResult<(Columns, Vec<(usize, usize)>, Vec<Event>)> {
        let limits = Limits { rows: rows.max(1), bytes: bytes.max(1) };
        let wait = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let until = Instant::now() + wait.min(Duration::from_secs(3600));
        let rows = Rows::new(&self.needs);
        let mut taken = Taken { rows, runs: Vec::new(), events: Vec::new() };
        py.detach(|| loop {
            self.arrival.forget(); // what arrives from here on is told again
            let left = until.saturating_duration_since(Instant::now());
            if self.scan(&mut taken, &limits)? || left.is_zero() {
                return Ok::<(), PyErr>(());
            }
            if self.arrival.await_for(left) {
                return Ok(());
            }
        })?;
        let columns = taken.rows.finish().map_err(invalid)?;
        Ok((columns.into(), taken.runs, taken.events))
    }

    /// Called before the consumer is closed: it does not end while messages of it exist.
    fn close(&mut self) {
        self.queues.clear();
        self.common = None;
        self.client = 0;
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Gather>()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::ffi::{c_char, c_int, CStr};
    use std::ptr::{null, null_mut};

    use arrow_array::{cast::AsArray, types::Int64Type, Array};

    use super::*;
    use crate::rdkafka::RawMessage;

    thread_local! {
        static WAITING: RefCell<Vec<RawMessage>> = const { RefCell::new(Vec::new()) };
        static DESTROYED: RefCell<Vec<i64>> = const { RefCell::new(Vec::new()) };
    }

    unsafe extern "C" fn consume(_: Handle, _: c_int, to: *mut *mut RawMessage, most: usize) -> isize {
        WAITING.with_borrow_mut(|waiting| {
            let count = waiting.len().min(most);
            for (at, one) in waiting.drain(..count).enumerate() {
                to.add(at).write(Box::into_raw(Box::new(one)));
            }
            count as isize
        })
    }
    unsafe extern "C" fn destroy(message: *mut RawMessage) {
        let message = Box::from_raw(message);
        DESTROYED.with_borrow_mut(|all| all.push(message.offset));
    }
    unsafe extern "C" fn epoch(message: *const RawMessage) -> i32 {
        (*message).offset as i32 / 100
    }
    unsafe extern "C" fn timestamp(message: *const RawMessage, kind: *mut c_int) -> i64 {
        *kind = c_int::from((*message).offset != 0);
        [7, 7, i64::MAX][(*message).offset.min(2) as usize]
    }
    unsafe extern "C" fn headers(message: *const RawMessage, list: *mut Handle) -> i32 {
        *list = message.cast_mut().cast();
        -i32::from((*message).key_len == 0) // those without a key have none
    }
    unsafe extern "C" fn header(
        _: Handle,
        at: usize,
        name: *mut *const c_char,
        value: *mut *const u8,
        len: *mut usize,
    ) -> i32 {
        let found: [(&CStr, *const u8, usize); 2] = [(c"a\xff", b"x".as_ptr(), 1), (c"", null(), 0)];
        if at < found.len() {
            (*name, *value, *len) = (found[at].0.as_ptr(), found[at].1, found[at].2);
        }
        i32::from(at >= found.len())
    }
    unsafe extern "C" fn text(_: i32) -> *const c_char {
        c"the code's text".as_ptr()
    }
    unsafe extern "C" fn queue(_: Handle, _: *const c_char, _: i32) -> Handle {
        std::ptr::dangling_mut::<u8>().cast()
    }
    unsafe extern "C" fn forward(_: Handle, to: Handle) {
        assert!(to.is_null());
    }
    unsafe extern "C" fn enable(_: Handle, _: Option<unsafe extern "C" fn(Handle, Handle)>, _: Handle) {}
    unsafe extern "C" fn nothing(_: Handle) {}
    unsafe extern "C" fn common(_: Handle) -> Handle {
        null_mut()
    }
    unsafe extern "C" fn code() -> i32 {
        0
    }
    unsafe extern "C" fn no_topic(_: Handle, _: *const c_char, _: Handle) -> Handle {
        null_mut()
    }
    unsafe extern "C" fn produce(_: Handle, _: i32, _: c_int, _: *mut RawMessage, _: c_int) -> c_int {
        0
    }

    static FAKE: Api = Api {
        consume_batch_queue: consume,
        err2str: text,
        header_get_all: header,
        last_error: code,
        message_destroy: destroy,
        message_headers: headers,
        message_leader_epoch: epoch,
        message_timestamp: timestamp,
        produce_batch: produce,
        queue_cb_event_enable: enable,
        queue_destroy: nothing,
        queue_forward: forward,
        queue_get_consumer: common,
        queue_get_partition: queue,
        topic_destroy: nothing,
        topic_new: no_topic,
    };

    fn message(offset: i64, err: i32, key: &'static [u8], value: Option<&'static [u8]>) -> RawMessage {
        RawMessage {
            err,
            topic: null_mut(),
            partition: 0,
            payload: value.map_or(null(), <[u8]>::as_ptr),
            len: value.map_or(0, <[u8]>::len),
            key: if key.is_empty() { null() } else { key.as_ptr() },
            key_len: key.len(),
            offset,
            private: null_mut(),
        }
    }

    fn opened(messages: Vec<RawMessage>) -> Queue {
        WAITING.set(messages);
        DESTROYED.take();
        unsafe { Queue::open(&FAKE, null_mut(), c"t", 0, &Arc::default()) }.expect("a queue")
    }

    fn nothing_yet() -> Taken {
        let needs = ["timestamp", "key", "value", "headers"].map(String::from);
        Taken { rows: Rows::new(&needs.into()), runs: Vec::new(), events: Vec::new() }
    }

    #[test]
    fn columns_contain_what_the_messages_do() {
        let mut taken = nothing_yet();
        let mut queue = opened(vec![
            message(0, 0, b"k", Some(b"one")),
            message(1, 0, b"", None),
            message(100, 0, b"", Some(b"")),
            message(101, -191, b"", Some(b"the end")),
            message(-1, -140, b"", None),
        ]);
        let limits = Limits { rows: 100, bytes: 1000 };
        assert!(!drain(&mut queue, 3, 0, &mut taken, &limits).expect("no error"));
        assert_eq!(
            taken.events,
            [(3, -191, 101, "the end".into()), (3, -140, -1, "the code's text".into())]
        );
        assert_eq!(DESTROYED.take(), [0, 1, 100, 101, -1]);
        let rows = taken.rows.finish().expect("columns");
        let names: Vec<_> = rows.schema().fields().iter().map(|one| one.name().clone()).collect();
        assert_eq!(names, ["offset", "leader_epoch", "timestamp", "key", "value", "headers"]);
        assert_eq!(rows.column(0).as_primitive::<Int64Type>().values(), &[0, 1, 100]);
        assert_eq!(
            rows.column(2).nulls().map(|one| one.iter().collect()),
            Some(vec![false, true, false]),
            "no time, a time, and one that no column can hold"
        );
        let values: Vec<_> = rows.column(4).as_binary::<i32>().iter().collect();
        assert_eq!(values, [Some(&b"one"[..]), None, Some(b"")]);
        let headers = rows.column(5).as_list::<i32>();
        assert_eq!(headers.value_offsets(), [0, 2, 2, 2]);
        let pairs = headers.values().as_struct();
        let names: Vec<_> = pairs.column(0).as_string::<i32>().iter().collect();
        assert_eq!(names, [Some("\u{fffd}"), Some("")]);
        let values: Vec<_> = pairs.column(1).as_binary::<i32>().iter().collect();
        assert_eq!(values, [Some(&b"x"[..]), None]);
    }

    #[test]
    fn what_does_not_fit_is_taken_by_the_next_call() {
        for (limits, counts) in [
            (Limits { rows: 2, bytes: 1000 }, [2, 2, 1]),
            (Limits { rows: 9, bytes: 10 }, [2, 2, 1]),
            (Limits { rows: 9, bytes: 14 }, [2, 2, 1]),
        ] {
            let mut queue = opened((0..5).map(|at| message(at, 0, b"", Some(b"12345"))).collect());
            let mut found = Vec::new();
            for count in counts {
                let mut taken = nothing_yet();
                let full = drain(&mut queue, 0, 0, &mut taken, &limits).expect("no error");
                assert_eq!((taken.rows.len(), full), (count, count == 2));
                found.extend(taken.rows.offset);
            }
            assert_eq!(found, [0, 1, 2, 3, 4]);
            assert_eq!(DESTROYED.take(), [0, 1, 2, 3, 4]);
        }
    }

    #[test]
    fn one_record_is_taken_however_large_it_is() {
        let mut queue = opened((0..2).map(|at| message(at, 0, b"", Some(b"12345"))).collect());
        let mut taken = nothing_yet();
        assert!(drain(&mut queue, 0, 0, &mut taken, &Limits { rows: 9, bytes: 1 }).expect("no error"));
        assert_eq!(taken.rows.len(), 1);
        assert_eq!(DESTROYED.take(), [0]);
        drop(queue);
        assert_eq!(DESTROYED.take(), [1], "what is left is destroyed with the queue");
    }

    #[test]
    fn a_record_that_no_column_can_hold_is_an_error_and_stays() {
        let mut large = message(0, 0, b"", Some(b"x"));
        large.len = MOST + 1;
        let mut queue = opened(vec![large]);
        let taken = &mut nothing_yet();
        assert!(drain(&mut queue, 0, 0, taken, &Limits { rows: 9, bytes: 9 }).is_err());
        assert!(DESTROYED.take().is_empty());
        drop(queue);
        assert_eq!(DESTROYED.take(), [0]);
    }
}
