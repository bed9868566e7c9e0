//! librdkafka's public C functions, in the library that is loaded already, and owners of its objects.

use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::ptr::{null, null_mut, NonNull};
use std::slice;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

pub type Handle = *mut c_void;

/// `rd_kafka_message_t` of rdkafka.h.
#[repr(C)]
pub struct RawMessage {
    pub err: i32,
    pub topic: Handle,
    pub partition: i32,
    pub payload: *const u8,
    pub len: usize,
    pub key: *const u8,
    pub key_len: usize,
    pub offset: i64,
    pub private: Handle,
}

macro_rules! functions {
    ($($name:ident: fn($($given:ty),*) $(-> $result:ty)?;)*) => {
        pub struct Api { $(pub $name: unsafe extern "C" fn($($given),*) $(-> $result)?,)* }

        impl Api {
            /// Safety: the library is librdkafka, or is linked with it.
            unsafe fn found_in(library: Handle) -> Result<Api, String> {
                Ok(Api { $($name: {
                    let name = concat!("rd_kafka_", stringify!($name), "\0");
                    let found = libc::dlsym(library, name.as_ptr().cast());
                    if found.is_null() {
                        return Err(format!("no function rd_kafka_{}", stringify!($name)));
                    }
                    std::mem::transmute::<Handle, unsafe extern "C" fn($($given),*) $(-> $result)?>(found)
                },)* })
            }
        }
    };
}

functions! {
    consume_batch_queue: fn(Handle, c_int, *mut *mut RawMessage, usize) -> isize;
    err2str: fn(i32) -> *const c_char;
    header_get_all: fn(Handle, usize, *mut *const c_char, *mut *const u8, *mut usize) -> i32;
    last_error: fn() -> i32;
    message_destroy: fn(*mut RawMessage);
    message_headers: fn(*const RawMessage, *mut Handle) -> i32;
    message_leader_epoch: fn(*const RawMessage) -> i32;
    message_timestamp: fn(*const RawMessage, *mut c_int) -> i64;
    produce_batch: fn(Handle, i32, c_int, *mut RawMessage, c_int) -> c_int;
    queue_cb_event_enable: fn(Handle, Option<unsafe extern "C" fn(Handle, Handle)>, Handle);
    queue_destroy: fn(Handle);
    queue_forward: fn(Handle, Handle);
    queue_get_consumer: fn(Handle) -> Handle;
    queue_get_partition: fn(Handle, *const c_char, i32) -> Handle;
    topic_destroy: fn(Handle);
    topic_new: fn(Handle, *const c_char, Handle) -> Handle;
}

static API: OnceLock<Result<Api, String>> = OnceLock::new();

/// The functions that a loaded library is linked with: a process has one librdkafka.
pub fn api(path: &CStr) -> Result<&'static Api, String> {
    API.get_or_init(|| unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        if library.is_null() {
            return Err(format!("{} is not loaded", path.to_string_lossy()));
        }
        Api::found_in(library)
    })
    .as_ref()
    .map_err(Clone::clone)
}

/// A message, or an event of its partition, that is destroyed with this value.
pub struct Message {
    raw: NonNull<RawMessage>,
    api: &'static Api,
}

impl Message {
    fn raw(&self) -> &RawMessage {
        unsafe { self.raw.as_ref() }
    }

    pub fn error(&self) -> Option<i32> {
        (self.raw().err != 0).then_some(self.raw().err)
    }

    /// The text of an error.
    pub fn text(&self) -> String {
        if let Some(text) = self.value() {
            return String::from_utf8_lossy(text).into_owned();
        }
        let text = unsafe { CStr::from_ptr((self.api.err2str)(self.raw().err)) };
        text.to_string_lossy().into_owned()
    }

    pub fn offset(&self) -> i64 {
        self.raw().offset
    }

    pub fn leader_epoch(&self) -> i32 {
        unsafe { (self.api.message_leader_epoch)(self.raw.as_ptr()) }
    }

    /// Milliseconds since 1970; a CreateTime of -1 is none (KIP-32).
    pub fn timestamp(&self) -> Option<i64> {
        let mut kind = 0;
        let found = unsafe { (self.api.message_timestamp)(self.raw.as_ptr(), &mut kind) };
        (kind != 0 && found != -1).then_some(found)
    }

    pub fn key(&self) -> Option<&[u8]> {
        unsafe { bytes(self.raw().key, self.raw().key_len) }
    }

    pub fn value(&self) -> Option<&[u8]> {
        unsafe { bytes(self.raw().payload, self.raw().len) }
    }

    /// The bytes of key and value.
    pub fn len(&self) -> usize {
        self.raw().key_len + self.raw().len
    }

    pub fn headers(&self) -> impl Iterator<Item = (&CStr, Option<&[u8]>)> {
        let mut list = null_mut();
        let known = unsafe { (self.api.message_headers)(self.raw.as_ptr(), &mut list) } == 0;
        (0..).map_while(move |at| {
            let (mut name, mut value, mut len) = (null(), null(), 0);
            if !known {
                return None;
            }
            // Safety: the list belongs to the message, which this iterator borrows.
            unsafe {
                let end = (self.api.header_get_all)(list, at, &mut name, &mut value, &mut len);
                (end == 0).then(|| (CStr::from_ptr(name), bytes(value, len)))
            }
        })
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        unsafe { (self.api.message_destroy)(self.raw.as_ptr()) }
    }
}

unsafe fn bytes<'a>(start: *const u8, len: usize) -> Option<&'a [u8]> {
    (!start.is_null()).then(|| slice::from_raw_parts(start, len))
}

/// Tells a thread that a queue is not empty any more.
#[derive(Default)]
pub struct Arrival {
    told: Mutex<Told>,
    changed: Condvar,
}

/// The kinds of queues that something has arrived in.
#[derive(Default)]
struct Told {
    partition: bool,
    common: bool,
}

impl Arrival {
    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Called before the partitions' queues are looked at.
    pub fn forget(&self) {
        self.told().partition = false;
    }

    /// True if something has arrived in the common queue since this was last told.
    pub fn await_for(&self, time: Duration) -> bool {
        let none = |told: &mut Told| !told.partition && !told.common;
        let waited = self.changed.wait_timeout_while(self.told(), time, none);
        let mut told = waited.unwrap_or_else(PoisonError::into_inner).0;
        std::mem::take(&mut told.common)
    }

    fn tell(&self, change: impl FnOnce(&mut Told)) {
        change(&mut self.told());
        self.changed.notify_one();
    }

    /// Called by librdkafka's threads.
    unsafe extern "C" fn partition(_client: Handle, arrival: Handle) {
        (*arrival.cast::<Arrival>()).tell(|told| told.partition = true);
    }

    /// Called by librdkafka's threads.
    unsafe extern "C" fn common(_client: Handle, arrival: Handle) {
        (*arrival.cast::<Arrival>()).tell(|told| told.common = true);
    }
}

/// A queue of librdkafka that tells of arrivals while this value exists.
struct Listened {
    raw: NonNull<c_void>,
    _arrival: Arc<Arrival>, // the callback's argument
    api: &'static Api,
}

impl Listened {
    unsafe fn new(
        api: &'static Api,
        raw: NonNull<c_void>,
        arrival: &Arc<Arrival>,
        tell: unsafe extern "C" fn(Handle, Handle),
    ) -> Self {
        (api.queue_cb_event_enable)(raw.as_ptr(), Some(tell), Arc::as_ptr(arrival).cast_mut().cast());
        Listened { raw, _arrival: arrival.clone(), api }
    }
}

impl Drop for Listened {
    fn drop(&mut self) {
        // No thread is inside of the callback when this returns: both have the queue's lock.
        unsafe {
            (self.api.queue_cb_event_enable)(self.raw.as_ptr(), None, null_mut());
            (self.api.queue_destroy)(self.raw.as_ptr());
        }
    }
}

/// The consumer's common queue: what arrives there is served by confluent-kafka's `poll`.
pub struct Common {
    _queue: Listened,
}

impl Common {
    /// Safety: the client is a consumer, and exists longer than this value.
    pub unsafe fn open(api: &'static Api, client: Handle, arrival: &Arc<Arrival>) -> Option<Common> {
        let raw = NonNull::new((api.queue_get_consumer)(client))?;
        Some(Common { _queue: Listened::new(api, raw, arrival, Arrival::common) })
    }
}

/// The queue of one partition of a consumer: its messages do not reach the consumer's own queue.
pub struct Queue {
    taken: VecDeque<Message>, // dropped before the queue
    queue: Listened,
}

const AT_ONCE: usize = 1024;

impl Queue {
    /// Safety: the client is a consumer, and exists longer than the queue.
    pub unsafe fn open(
        api: &'static Api,
        client: Handle,
        topic: &CStr,
        partition: i32,
        arrival: &Arc<Arrival>,
    ) -> Option<Queue> {
        let raw = NonNull::new((api.queue_get_partition)(client, topic.as_ptr(), partition))?;
        // An assignment forwards a queue to the consumer's unless the application has set this.
        (api.queue_forward)(raw.as_ptr(), null_mut());
        let queue = Listened::new(api, raw, arrival, Arrival::partition);
        Some(Queue { taken: VecDeque::new(), queue })
    }

    /// The next message, which stays in the queue.
    ///
    /// `most`: messages that are taken out of librdkafka's queue where none is at hand.
    pub fn front(&mut self, most: usize) -> Option<&Message> {
        if self.taken.is_empty() {
            let mut raw = [null_mut(); AT_ONCE];
            let most = most.clamp(1, AT_ONCE);
            let Listened { raw: queue, api, .. } = self.queue;
            let count =
                unsafe { (api.consume_batch_queue)(queue.as_ptr(), 0, raw.as_mut_ptr(), most) };
            let count = usize::try_from(count).unwrap_or(0).min(most);
            let own = |&one| NonNull::new(one).map(|raw| Message { raw, api });
            self.taken.extend(raw[..count].iter().filter_map(own));
        }
        self.taken.front()
    }

    /// Destroy the next message.
    pub fn pop(&mut self) {
        self.taken.pop_front();
    }

    /// Destroy the messages that were taken out of librdkafka's queue.
    pub fn clear(&mut self) {
        self.taken.clear();
    }
}

// Safety: librdkafka's functions may be called by any thread; whoever has the value calls them.
unsafe impl Send for Message {}
unsafe impl Sync for Message {}
unsafe impl Send for Listened {}
unsafe impl Sync for Listened {}

/// A name for C.
pub fn c_string(text: &str) -> Result<CString, String> {
    CString::new(text).map_err(|error| error.to_string())
}
