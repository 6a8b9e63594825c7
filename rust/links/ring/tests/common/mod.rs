//! What the tests share: messages that say where they belong, deadlines, children, and a count of
//! what this process holds.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use sparksched_backlog::Limits;
use sparksched_ring::client::{ClientOptions, ClientRings};
use sparksched_ring::engine::{EngineOptions, EngineRings};
use sparksched_ring::link::{End, Event, Link};
use sparksched_ring::outbox::SendError;

/// Long enough for anything that isn't a hang, on a machine that is busy with other things or stands
/// still for seconds.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Long enough that nobody is called stuck who isn't.
pub const NEVER_STUCK: Duration = Duration::from_secs(600);
/// Longer than several things that must happen may take together, one after the other.
pub const LAST_RESORT: Duration = Duration::from_secs(300);

// ------------------------------------------------------------------------------------
// Chance
// ------------------------------------------------------------------------------------

/// Numbers that look random and are the same each time.
pub struct Chance(u64);

impl Chance {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

// ------------------------------------------------------------------------------------
// Messages
// ------------------------------------------------------------------------------------

/// The frames of a stream's message: 1 byte to `max_bytes`, most of them small. Frames of 16 bytes
/// and more contain stream and number, all of them follow from these.
pub fn frames(stream: u64, number: u64, max_bytes: u64) -> Vec<Vec<u8>> {
    let mut chance = Chance::new(stream.wrapping_mul(0x0100_0003) ^ number.rotate_left(40));
    let limit = match chance.below(4) {
        0 => 16,
        1 => max_bytes.div_ceil(12),
        2 => max_bytes.div_ceil(3),
        _ => max_bytes,
    };
    let len = 1 + chance.below(limit.min(max_bytes)) as usize;
    let mut bytes: Vec<u8> = Vec::with_capacity(len + 16);
    bytes.extend(stream.to_le_bytes());
    bytes.extend(number.to_le_bytes());
    while bytes.len() < len {
        bytes.extend(chance.next().to_le_bytes());
    }
    bytes.truncate(len);
    match chance.below(3) {
        0 => vec![bytes],
        1 => vec![bytes, Vec::new()],
        _ => {
            let rest = bytes.split_off(chance.below(len as u64) as usize);
            vec![bytes, rest]
        }
    }
}

/// One end of a link, as its user sees it: what it has sent, and what has come.
#[derive(Debug)]
pub struct Half {
    outgoing: u64,
    incoming: u64,
    max_bytes: u64,
    pub num_sent: u64,
    pub num_received: u64,
    pub num_stuck: u32,
    pub num_recovered: u32,
    /// How long the other side was silent when it was last called stuck.
    pub last_silence: Duration,
    pub end: Option<End>,
}

impl Half {
    pub fn of_client(client: u32, max_bytes: u64) -> Self {
        Self::new(2 * u64::from(client), 2 * u64::from(client) + 1, max_bytes)
    }

    pub fn of_engine(client: u32, max_bytes: u64) -> Self {
        Self::new(2 * u64::from(client) + 1, 2 * u64::from(client), max_bytes)
    }

    fn new(outgoing: u64, incoming: u64, max_bytes: u64) -> Self {
        Self {
            outgoing,
            incoming,
            max_bytes,
            num_sent: 0,
            num_received: 0,
            num_stuck: 0,
            num_recovered: 0,
            last_silence: Duration::ZERO,
            end: None,
        }
    }

    /// Sends the next message unless `total` have been sent; false if it was not accepted.
    pub fn send(&mut self, link: &Link, total: u64) -> bool {
        if self.num_sent >= total || self.end.is_some() {
            return false;
        }
        let frames = frames(self.outgoing, self.num_sent, self.max_bytes);
        let slices: Vec<_> = frames.iter().map(Vec::as_slice).collect();
        match link.send(self.num_sent as u8, &slices, false) {
            Ok(ticket) => assert_eq!(ticket, self.num_sent, "tickets count the messages"),
            Err(SendError::Full) => {
                link.unblock();
                return false;
            }
            Err(SendError::Gone) => return false,
            Err(error) => panic!("message {} can't be sent: {error}", self.num_sent),
        }
        self.num_sent += 1;
        true
    }

    /// Checks that an event is the next that may come.
    pub fn take(&mut self, event: Event) {
        assert!(self.end.is_none(), "{event:?} after the end {:?}", self.end);
        match event {
            Event::Message(message) => {
                let expected = frames(self.incoming, self.num_received, self.max_bytes);
                assert!(
                    message.kind == self.num_received as u8 && message.frames == expected,
                    "message {} of stream {} is lost, doubled or damaged",
                    self.num_received,
                    self.incoming,
                );
                self.num_received += 1;
            }
            Event::Stuck(silence) => {
                self.num_stuck += 1;
                self.last_silence = silence;
            }
            Event::Recovered => self.num_recovered += 1,
            Event::End(end) => self.end = Some(end),
        }
    }

    /// Whether the other side was called stuck and not yet said to run again.
    pub fn is_stuck(&self) -> bool {
        self.num_stuck > self.num_recovered
    }
}

// ------------------------------------------------------------------------------------
// Engines and clients
// ------------------------------------------------------------------------------------

/// A name that no other engine has.
pub fn fresh_name(what: &str) -> String {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("sparksched-test-{}-{what}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed))
}

pub fn engine_options(num_clients: u32, ring_bytes: usize) -> EngineOptions {
    EngineOptions {
        num_clients,
        ring_bytes,
        backlog: Limits::fixed(64 << 10),
        stuck_after: NEVER_STUCK,
        version: "test".to_owned(),
    }
}

pub fn client_options(client_index: u32) -> ClientOptions {
    ClientOptions { client_index, stuck_after: NEVER_STUCK, version: "test".to_owned() }
}

pub fn listen(name: &str, options: EngineOptions) -> EngineRings {
    EngineRings::listen(name, options).unwrap_or_else(|error| panic!("listen on {name}: {error}"))
}

/// Connects once somebody listens, and again if one of the two took so long that it was given up;
/// `None` if `give_up` says so before.
pub fn connect(
    name: &str,
    options: &ClientOptions,
    mut give_up: impl FnMut() -> bool,
) -> Option<ClientRings> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match ClientRings::connect(name, options.clone()) {
            Ok(client) => return Some(client),
            Err(_) if give_up() => return None,
            Err(error) => assert!(Instant::now() < deadline, "connect to {name}: {error}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

// ------------------------------------------------------------------------------------
// Deadlines
// ------------------------------------------------------------------------------------

/// Ends the process with a message unless it is dropped in time: the last resort against a hang in a
/// call that should have come back.
pub struct Deadline(Option<Sender<()>>);

impl Deadline {
    pub fn after(limit: Duration, what: &str) -> Self {
        let (sender, receiver) = channel();
        let what = what.to_owned();
        std::thread::spawn(move || {
            if receiver.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{what}: still not over after {limit:?}");
                std::process::abort();
            }
        });
        Self(Some(sender))
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}

/// Repeats `step` until it says that it is done.
pub fn until(what: &str, step: impl FnMut() -> bool) {
    until_within(PATIENCE, what, step);
}

/// The same for what may take longer, or less long.
pub fn until_within(limit: Duration, what: &str, mut step: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    loop {
        let is_done = step();
        // Also if it is done: a wait may have ended because its time was up.
        assert!(Instant::now() < deadline, "{what}: not within {limit:?}");
        if is_done {
            return;
        }
    }
}

// ------------------------------------------------------------------------------------
// Children
// ------------------------------------------------------------------------------------

/// Says which role a child plays; without it the test that is the child's part does nothing.
pub const ROLE: &str = "SPARKSCHED_TEST_ROLE";
const NUM_NOTES: u64 = 8;
/// Where a child's notes lie in the file that is its output; libtest's own words stay far below.
const NOTES_OFFSET: u64 = 1 << 20;

/// A child of this process that runs this test binary's `child_main`.
pub struct Kid {
    child: Child,
    output: OwnedFd,
    what: String,
}

impl Kid {
    /// A child in a role with further variables. `what` is for messages.
    pub fn spawn(what: &str, role: &str, variables: &[(&str, String)]) -> Self {
        let output = memfd_create("kid", MemfdFlags::CLOEXEC).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_main", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env("RUST_BACKTRACE", "0")
            .envs(variables.iter().map(|(name, value)| (*name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::from(output.try_clone().unwrap()))
            .spawn()
            .unwrap();
        Self { child, output, what: what.to_owned() }
    }

    /// What it has noted last; 0 at first.
    pub fn note(&self, index: u64) -> u64 {
        assert!(index < NUM_NOTES);
        let mut bytes = [0; 8];
        let _ = rustix::io::pread(&self.output, &mut bytes, NOTES_OFFSET + 8 * index).unwrap();
        u64::from_le_bytes(bytes)
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Waits until it has been stopped by a signal.
    pub fn wait_for_stop(&self, mut meanwhile: impl FnMut()) {
        until(&format!("{}: the child stops", self.what), || {
            meanwhile();
            let options = WaitOptions::UNTRACED | WaitOptions::NOHANG;
            match waitpid(Some(self.pid()), options).unwrap() {
                Some((_, status)) => {
                    assert!(status.stopped(), "{}: the child ended instead", self.what);
                    true
                }
                None => false,
            }
        });
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "{}: the child doesn't end", self.what);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn expect_kill(&mut self) {
        let status = self.wait();
        assert_eq!(
            status.signal(),
            Some(Signal::KILL.as_raw()),
            "{}: the child was to be killed, but ended with {status}",
            self.what
        );
    }

    pub fn expect_success(&mut self) {
        let status = self.wait();
        assert!(status.success(), "{}: the child ended with {status}", self.what);
    }
}

impl Drop for Kid {
    fn drop(&mut self) {
        // Where a test has failed; elsewhere it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Notes a number for the parent, even if this process is killed right after.
pub fn note(index: u64, value: u64) {
    assert!(index < NUM_NOTES);
    let stdout = std::io::stdout();
    let written =
        rustix::io::pwrite(stdout.as_fd(), &value.to_le_bytes(), NOTES_OFFSET + 8 * index);
    assert_eq!(written, Ok(8), "the parent's file takes notes");
}

/// A variable that the parent has set.
pub fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}

pub fn number(name: &str) -> u64 {
    variable(name).parse().unwrap_or_else(|_| panic!("{name} is no number"))
}

/// A variable that sets the size of a test, or its default.
pub fn number_or(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |_| number(name))
}

// ------------------------------------------------------------------------------------
// What a process holds
// ------------------------------------------------------------------------------------

/// Counts of what must not grow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holdings {
    descriptors: usize,
    mappings: usize,
    threads: usize,
    children: usize,
}

impl Holdings {
    pub fn now() -> Self {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mut holdings = Self {
            descriptors: std::fs::read_dir("/proc/self/fd").unwrap().count(),
            mappings: maps.lines().filter(|line| line.contains("memfd:sparksched")).count(),
            threads: 0,
            children: 0,
        };
        for task in std::fs::read_dir("/proc/self/task").unwrap() {
            let task = task.unwrap().path();
            // A thread may end while they are listed.
            let name = std::fs::read_to_string(task.join("comm")).unwrap_or_default();
            let children = std::fs::read_to_string(task.join("children")).unwrap_or_default();
            // Those of libtest and of the deadlines come and go.
            holdings.threads += usize::from(name.starts_with("sparksched"));
            holdings.children += children.split_whitespace().count();
        }
        holdings
    }

    /// Asserts that no more is held now, once threads that are about to end have ended.
    pub fn assert_unchanged(&self, what: &str) {
        let deadline = Instant::now() + PATIENCE;
        while Self::now() != *self {
            assert!(Instant::now() < deadline, "{what}: {:?} are held, not {self:?}", Self::now());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
