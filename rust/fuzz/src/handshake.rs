//! Handshakes with an engine or a client that says anything, with any descriptors, and hangs up at any
//! time: the other side gets together with it if it kept to the protocol, and otherwise gives it up
//! with a reason.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::LazyLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use arbitrary::Arbitrary;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown,
    SocketAddrUnix, SocketFlags, SocketType, sendmsg, socket_with,
};
use sparksched_backlog::Limits;
use sparksched_ring::client::{ClientOptions, ClientRings};
use sparksched_ring::engine::{EngineEvent, EngineOptions, EngineRings};
use sparksched_ring::segment::{BellPage, LAYOUT_VERSION, Segment};

const RING_BYTES: usize = 4096;
const MARK: &[u8] = b"SPRKRING";
const VERSION: &str = "0.1.0";
const MAX_DESCRIPTORS: usize = 6;
/// Who has to wait for longer, because the machine stands still, gives the other side up.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Arbitrary, Debug)]
enum Words {
    Hello { protocol: Option<u32>, layout: Option<u32>, client_index: u32, version: Option<String> },
    Confirmation,
    Welcome { ring_bytes: Option<u64> },
    Refusal(Vec<u8>),
    Admission,
    Marked(Vec<u8>),
    Other(Vec<u8>),
}

#[derive(Arbitrary, Clone, Copy, Debug, PartialEq)]
enum Descriptor {
    Segment,
    LargeSegment,
    Bell,
    Event,
    Unsealed,
    Socket,
}

#[derive(Arbitrary, Debug)]
struct Packet {
    words: Words,
    descriptors: Vec<Descriptor>,
}

#[derive(Arbitrary, Debug)]
enum Stranger {
    Client(Vec<Packet>),
    Engine(Vec<Packet>),
}

/// Who comes, and what it says.
#[derive(Arbitrary, Debug)]
pub struct Input(Stranger);

impl Words {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Hello { protocol, layout, client_index, version } => [
                MARK,
                &protocol.unwrap_or(1).to_le_bytes(),
                &layout.unwrap_or(LAYOUT_VERSION).to_le_bytes(),
                &client_index.to_le_bytes(),
                version.as_deref().unwrap_or(VERSION).as_bytes(),
            ]
            .concat(),
            Self::Confirmation => MARK.to_vec(),
            Self::Welcome { ring_bytes } => {
                let ring_bytes = ring_bytes.unwrap_or(RING_BYTES as u64);
                [MARK, &[0], &ring_bytes.to_le_bytes()].concat()
            }
            Self::Refusal(reason) => [MARK, &[1], reason].concat(),
            Self::Admission => [MARK, &[2]].concat(),
            Self::Marked(rest) => [MARK, rest].concat(),
            Self::Other(bytes) => bytes.clone(),
        }
    }
}

/// One descriptor of each kind.
struct Descriptors {
    segment: OwnedFd,
    large_segment: OwnedFd,
    bell: OwnedFd,
    event: OwnedFd,
    unsealed: OwnedFd,
    socket: OwnedFd,
}

static DESCRIPTORS: LazyLock<Descriptors> = LazyLock::new(|| Descriptors {
    segment: Segment::create(RING_BYTES).unwrap().1,
    large_segment: Segment::create(2 * RING_BYTES).unwrap().1,
    bell: BellPage::create().unwrap().1,
    event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap(),
    unsealed: memfd_create("unsealed", MemfdFlags::CLOEXEC).unwrap(),
    socket: socket(),
});

impl Descriptor {
    fn get(self) -> &'static OwnedFd {
        match self {
            Self::Segment => &DESCRIPTORS.segment,
            Self::LargeSegment => &DESCRIPTORS.large_segment,
            Self::Bell => &DESCRIPTORS.bell,
            Self::Event => &DESCRIPTORS.event,
            Self::Unsealed => &DESCRIPTORS.unsealed,
            Self::Socket => &DESCRIPTORS.socket,
        }
    }
}

fn socket() -> OwnedFd {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn fresh_name() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("sparksched-fuzz-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed))
}

fn address(name: &str) -> SocketAddrUnix {
    SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()
}

/// Says everything at once and that no more will follow, and listens until the other side hangs up.
fn talk(socket: &OwnedFd, packets: &[Packet]) {
    for Packet { words, descriptors } in packets {
        let descriptors: Vec<_> =
            descriptors.iter().take(MAX_DESCRIPTORS).map(|it| it.get().as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        // The other side may have hung up, or its socket may be full: it has heard enough.
        if sendmsg(socket, &[IoSlice::new(&words.bytes())], &mut ancillary, flags).is_err() {
            break;
        }
    }
    let _ = rustix::net::shutdown(socket, Shutdown::Write);
    let mut heard = [0; 4096];
    while rustix::net::recv(socket, &mut heard, RecvFlags::empty()).is_ok_and(|(_, len)| len > 0) {}
}

fn check_engine(packets: &[Packet]) {
    let options = EngineOptions {
        num_clients: 1,
        ring_bytes: RING_BYTES,
        backlog: Limits::fixed(1 << 16),
        stuck_after: Duration::from_secs(60),
        version: VERSION.to_owned(),
    };
    let name = fresh_name();
    let start = Instant::now();
    let engine = EngineRings::listen(&name, options).unwrap();
    let guest = socket();
    rustix::net::connect(&guest, &address(&name)).unwrap();
    let events = std::thread::scope(|scope| {
        scope.spawn(|| talk(&guest, packets));
        let mut events = Vec::new();
        // libFuzzer's clock is a signal, which ends a wait.
        while events.is_empty() {
            events = engine.receive(None);
        }
        engine.close(Duration::ZERO);
        events
    });
    let hello = Words::Hello { protocol: None, layout: None, client_index: 0, version: None };
    let mut words = packets.iter().map(|packet| packet.words.bytes());
    let is_welcome = words.next() == Some(hello.bytes()) && words.next().as_deref() == Some(MARK);
    match &events[..] {
        [EngineEvent::Attached { client: 0, .. }, ..] => {
            assert!(is_welcome, "a stranger is let in");
        }
        [EngineEvent::Refused(reason)] => {
            assert!(!is_welcome || start.elapsed() >= PATIENCE, "a client is refused: {reason}");
        }
        other => panic!("{other:?}"),
    }
}

fn check_client(packets: &[Packet]) {
    let name = fresh_name();
    let listener = socket();
    rustix::net::bind(&listener, &address(&name)).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let options = ClientOptions {
        client_index: 0,
        stuck_after: Duration::from_secs(60),
        version: VERSION.to_owned(),
    };
    let start = Instant::now();
    let result = std::thread::scope(|scope| {
        scope.spawn(|| {
            let guest = rustix::net::accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
            talk(&guest, packets);
        });
        ClientRings::connect(&name, options).map(drop)
    });
    match result {
        Ok(()) => assert!(is_engine(packets), "a stranger is taken for an engine"),
        Err(error) => {
            assert!(!is_engine(packets) || start.elapsed() >= PATIENCE, "an engine: {error}");
        }
    }
}

/// Whether these are the packets of an engine that keeps to the protocol.
fn is_engine(packets: &[Packet]) -> bool {
    let [welcome, admission, ..] = packets else { return false };
    welcome.words.bytes() == Words::Welcome { ring_bytes: None }.bytes()
        && matches!(welcome.descriptors[..], [Descriptor::Segment, Descriptor::Bell, _])
        && admission.words.bytes() == Words::Admission.bytes()
}

/// Has it talk to the other side.
pub fn check(Input(stranger): &Input) {
    match stranger {
        Stranger::Client(packets) => check_engine(packets),
        Stranger::Engine(packets) => check_client(packets),
    }
}
