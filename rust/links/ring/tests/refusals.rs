//! Peers that don't keep to the protocol: what they are told, and what the others notice of them
//! (nothing). The packets are made here by hand, and shared memory is written to through its
//! descriptor, as a broken process might.
#![cfg(not(feature = "loom"))]

mod common;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::{
    Deadline, Kid, LAST_RESORT, PATIENCE, ROLE, client_options, connect, engine_options,
    fresh_name, listen, until, variable,
};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recv, recvmsg,
    sendmsg, socket_with,
};
use rustix::process::{Resource, Rlimit, Signal, Uid, geteuid, getrlimit, setrlimit};
use rustix::thread::set_thread_res_uid;
use sparksched_backlog::Limits;
use sparksched_ring::client::ClientRings;
use sparksched_ring::engine::{EngineEvent, EngineRings};
use sparksched_ring::handshake::HandshakeError;
use sparksched_ring::link::{End, Event};
use sparksched_ring::outbox::Outbox;
use sparksched_ring::points;
use sparksched_ring::ring::{Corrupt, Ring};
use sparksched_ring::segment::{BellPage, LAYOUT_VERSION, Segment};
use sparksched_shm::ShmError;

const RING_BYTES: usize = 4096;
const MARK: &[u8] = b"SPRKRING";
/// Where the positions lie in a segment: those of the ring to the engine, then of that to the client.
const TAIL: u64 = 0;
const HEAD: u64 = 128;
const TO_CLIENT: u64 = 512;
const DATA: u64 = 4096;

// ------------------------------------------------------------------------------------
// Sockets, by hand
// ------------------------------------------------------------------------------------

fn socket() -> OwnedFd {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn address(name: &str) -> SocketAddrUnix {
    SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()
}

fn knock(name: &str) -> OwnedFd {
    let socket = socket();
    rustix::net::connect(&socket, &address(name)).unwrap();
    socket
}

fn send(socket: &OwnedFd, packet: &[u8], descriptors: &[&OwnedFd]) {
    let descriptors: Vec<_> = descriptors.iter().map(|fd| fd.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
    }
    sendmsg(socket, &[IoSlice::new(packet)], &mut ancillary, SendFlags::NOSIGNAL).unwrap();
}

fn receive(socket: &OwnedFd) -> (Vec<u8>, Vec<OwnedFd>) {
    let mut packet = vec![0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let buffers = &mut [IoSliceMut::new(&mut packet)];
    let received = recvmsg(socket, buffers, &mut ancillary, RecvFlags::CMSG_CLOEXEC).unwrap();
    packet.truncate(received.bytes);
    let descriptors = ancillary
        .drain()
        .flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(rights) => rights.collect::<Vec<_>>(),
            _ => Vec::new(),
        })
        .collect();
    (packet, descriptors)
}

fn hello(protocol: u32, layout: u32, client_index: u32, version: &str) -> Vec<u8> {
    let mut packet = MARK.to_vec();
    for number in [protocol, layout, client_index] {
        packet.extend(number.to_le_bytes());
    }
    packet.extend(version.as_bytes());
    packet
}

fn write_u64(segment: &OwnedFd, offset: u64, value: u64) {
    assert_eq!(rustix::io::pwrite(segment, &value.to_le_bytes(), offset), Ok(8));
}

// ------------------------------------------------------------------------------------
// At the engine's door
// ------------------------------------------------------------------------------------

/// An engine, and a client 0 that keeps to the protocol.
struct House {
    engine: EngineRings,
    inhabitant: ClientRings,
    /// What the engine said of those that it refused, and nobody has asked for yet.
    refusals: RefCell<VecDeque<String>>,
}

impl House {
    fn new() -> Self {
        Self::for_clients(2)
    }

    fn for_clients(num_clients: u32) -> Self {
        let engine = listen(&fresh_name("refusals"), engine_options(num_clients, RING_BYTES));
        let inhabitant = connect(engine.name(), &client_options(0), || false).unwrap();
        Self { engine, inhabitant, refusals: RefCell::default() }
    }

    /// What happens to the inhabitant in a moment; whom the engine refuses meanwhile is noted.
    fn inhabitants_events(&self, what: &str) -> Vec<Event> {
        let mut events = Vec::new();
        for event in self.engine.receive(Some(Duration::from_millis(20))) {
            match event {
                EngineEvent::Link { client: 0, event } => events.push(event),
                EngineEvent::Refused(reason) => self.refusals.borrow_mut().push_back(reason),
                EngineEvent::Attached { client: 0 | 2, .. } => {}
                other => panic!("{what}: {other:?}"),
            }
        }
        events
    }

    /// What the engine says of the next that it refuses.
    fn refusal(&self) -> String {
        until("a refusal", || {
            let events = self.inhabitants_events("a refusal");
            assert!(events.is_empty(), "{events:?} beside a refusal");
            !self.refusals.borrow().is_empty()
        });
        self.refusals.borrow_mut().pop_front().unwrap()
    }

    /// The inhabitant is served as ever.
    fn assert_undisturbed(&self, what: &str) {
        self.inhabitant.link().send(1, &[b"question"], false).unwrap();
        let mut was_asked = false;
        until(&format!("{what}: the client is heard"), || {
            for event in self.inhabitants_events(what) {
                let Event::Message(message) = event else { panic!("{what}: {event:?}") };
                assert_eq!(message.frames, [b"question"]);
                was_asked = true;
            }
            was_asked
        });
        self.engine.link(0).unwrap().send(2, &[b"answer"], false).unwrap();
        let mut events = Vec::new();
        until(&format!("{what}: the client is answered"), || {
            self.inhabitant.wait(Some(Duration::from_millis(20)));
            events.extend(self.inhabitant.receive(16));
            !events.is_empty()
        });
        assert!(matches!(&events[..], [Event::Message(_)]), "{what}: {events:?}");
    }
}

#[test]
fn a_wrong_hello_is_refused_with_a_reason() {
    let _deadline = Deadline::after(LAST_RESORT, "wrong hellos");
    let house = House::new();
    let cases = [
        (hello(1, LAYOUT_VERSION, 1, "other"), "runs sparksched other, this one sparksched test"),
        (
            hello(7, LAYOUT_VERSION, 1, "test"),
            "sparksched test (protocol 7, layout 1), this one sparksched test (protocol 1, layout 1)",
        ),
        (
            hello(1, 9, 1, "test"),
            "sparksched test (protocol 1, layout 9), this one sparksched test (protocol 1, layout 1)",
        ),
        (hello(1, LAYOUT_VERSION, 2, "test"), "it serves 2 clients, and none with index 2"),
        (hello(1, LAYOUT_VERSION, u32::MAX, "test"), "none with index 4294967295"),
        (hello(1, LAYOUT_VERSION, 0, "test"), "client 0 is here already"),
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "doesn't speak this protocol"),
        (MARK.to_vec(), "doesn't speak this protocol"),
        (vec![0], "doesn't speak this protocol"),
        (vec![0xff; 5000], "doesn't speak this protocol"),
    ];
    for (packet, expected) in cases {
        let guest = knock(house.engine.name());
        send(&guest, &packet, &[]);
        let (reply, descriptors) = receive(&guest);
        let reason = reply.strip_prefix(b"SPRKRING\x01").expect("a refusal");
        let reason = String::from_utf8_lossy(reason).into_owned();
        assert!(reason.contains(expected), "told {reason:?} instead of {expected:?}");
        assert!(descriptors.is_empty(), "{expected}: refused, and given memory");
        let refusal = house.refusal();
        assert!(refusal.contains(expected), "reported {refusal:?} instead of {expected:?}");
        house.assert_undisturbed(expected);
    }
    // Our own client passes the reason on.
    let error = ClientRings::connect(house.engine.name(), client_options(5)).unwrap_err();
    let expected = "the engine refuses: it serves 2 clients, and none with index 5";
    assert_eq!(error.to_string(), expected);
    house.refusal();
    let mut options = client_options(1);
    options.version = "0".to_owned();
    let error = ClientRings::connect(house.engine.name(), options).unwrap_err();
    assert!(error.to_string().contains("runs sparksched 0, this one sparksched test"), "{error}");
}

#[test]
fn guests_that_leave_or_lie_in_the_handshake_are_refused() {
    let _deadline = Deadline::after(LAST_RESORT, "bad guests");
    let house = House::new();
    drop(knock(house.engine.name()));
    assert!(house.refusal().contains("hung up"), "a guest without a word");
    house.assert_undisturbed("a guest without a word");
    for (what, confirmation) in [("none", None), ("a wrong one", Some(b"maybe"))] {
        let guest = knock(house.engine.name());
        send(&guest, &hello(1, LAYOUT_VERSION, 1, "test"), &[]);
        let (reply, descriptors) = receive(&guest);
        assert!(reply.starts_with(b"SPRKRING\x00") && descriptors.len() == 3);
        if let Some(confirmation) = confirmation {
            send(&guest, confirmation, &[]);
        }
        drop(guest);
        house.refusal();
        house.assert_undisturbed(what);
    }
    // The place that they had is free again.
    let client = connect(house.engine.name(), &client_options(1), || false).unwrap();
    client.close(Duration::ZERO);
}

/// Guests who say nothing are given up, and not early. Whether the house lived on until then; it can't
/// be told if it stood still itself.
fn house_lives_on_beside_silent_guests() -> bool {
    let house = House::for_clients(3);
    let start = Instant::now();
    let silent = knock(house.engine.name());
    let half_silent = knock(house.engine.name());
    send(&half_silent, &hello(1, LAYOUT_VERSION, 1, "test"), &[]);
    // The door is opened to one after the other, by the thread that also watches.
    let _newcomer = connect(house.engine.name(), &client_options(2), || false).unwrap();
    house.assert_undisturbed("while somebody says nothing");
    let has_lived_on = house.refusals.borrow().is_empty();
    for _ in 0..2 {
        house.refusal();
        assert!(start.elapsed() >= Duration::from_millis(4500), "given up early");
    }
    drop((silent, half_silent));
    house.assert_undisturbed("after somebody said nothing");
    has_lived_on
}

#[test]
fn a_silent_guest_is_given_up_and_disturbs_nobody() {
    let _deadline = Deadline::after(LAST_RESORT, "silent guests");
    let lives_on = (0..5).any(|_| house_lives_on_beside_silent_guests());
    assert!(lives_on, "nobody is let in while others say nothing");
}

/// Whether the other side has hung up on a guest that said nothing.
fn is_hung_up(guest: &OwnedFd) -> bool {
    recv(guest, &mut [0; 1], RecvFlags::DONTWAIT).map(|(_, len)| len) != Err(Errno::AGAIN)
}

/// Allows this process as many descriptors as it may have.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
}

/// In how many rounds of this process's engines nobody was let in.
static NUM_SHUT: AtomicU64 = AtomicU64::new(0);

/// Idle connections of another user: each is closed at once, and a client is let in between them.
#[test]
fn strangers_are_turned_away_at_once() {
    const NUM_STRANGERS: usize = 1000;
    // Descriptors run out in a process of their own, so no other test's engine counts here.
    let _ = points::LISTENER.set(|point| {
        if point == points::SHUT {
            NUM_SHUT.fetch_add(1, Relaxed);
        }
    });
    if !geteuid().is_root() {
        eprintln!("skipped: only root can become another user");
        return;
    }
    let _deadline = Deadline::after(LAST_RESORT, "strangers");
    raise_descriptor_limit();
    let house = House::for_clients(3);
    let name = house.engine.name();
    let client = std::thread::scope(|scope| {
        let (is_crowded, crowd) = channel();
        let strangers = scope.spawn(move || {
            // Of this thread alone.
            set_thread_res_uid(None, Uid::from_raw(65534), None).unwrap();
            let mut come = Vec::new();
            while come.len() < NUM_STRANGERS {
                come.push(knock(name));
                // Half of them have come, and the others go on to.
                if come.len() == NUM_STRANGERS / 2 {
                    is_crowded.send(()).unwrap();
                }
            }
            come
        });
        crowd.recv().unwrap();
        let client = ClientRings::connect(name, client_options(2)).unwrap();
        let come = strangers.join().unwrap();
        until("all are turned away", || come.iter().all(is_hung_up));
        client
    });
    // What is said of them is no longer than what is said in a few seconds.
    let (mut num_told, mut num_reports) = (0, 0);
    until("all are told of", || {
        let _ = house.inhabitants_events("strangers");
        for report in house.refusals.borrow_mut().drain(..).filter(|it| it.contains("user 65534")) {
            let more = report.split_once("; ").map_or("0", |(_, more)| more);
            num_told += 1 + more.split(' ').next().unwrap().parse::<usize>().unwrap();
            num_reports += 1;
        }
        num_told == NUM_STRANGERS
    });
    assert!(num_reports < NUM_STRANGERS / 10, "{num_reports} lines in the log");
    until("the client is attached", || {
        let _ = house.inhabitants_events("strangers");
        house.engine.link(2).is_some()
    });
    house.engine.link(2).unwrap().send(0, &[b"welcome"], false).unwrap();
    client.wait(Some(PATIENCE));
    assert!(matches!(&client.receive(16)[..], [Event::Message(_)]), "it doesn't use its rings");
    assert_eq!(NUM_SHUT.load(Relaxed), 0, "the door was shut meanwhile");
    house.assert_undisturbed("after the strangers");
}

/// Silent connections of this user: the oldest make room, and a client is let in.
#[test]
fn a_crowd_of_silent_guests_is_thinned_out() {
    const NUM_GUESTS: usize = 300;
    let _deadline = Deadline::after(LAST_RESORT, "a crowd");
    raise_descriptor_limit();
    let house = House::for_clients(3);
    let guests: Vec<_> = (0..NUM_GUESTS).map(|_| knock(house.engine.name())).collect();
    let _client = connect(house.engine.name(), &client_options(2), || false).unwrap();
    let num_gone = || guests.iter().filter(|guest| is_hung_up(guest)).count();
    until("most have been given up", || num_gone() >= NUM_GUESTS - 64);
    for _ in 0..NUM_GUESTS {
        assert!(house.refusal().contains("said nothing"));
    }
    house.assert_undisturbed("after a crowd");
}

/// While the system has no descriptor for a connection, it stays in the queue, and its turn comes.
#[test]
fn whoever_comes_while_descriptors_are_short_is_let_in_later() {
    let _deadline = Deadline::after(LAST_RESORT, "no descriptors");
    let name = fresh_name("short");
    let mut kid = Kid::spawn("an engine", "short of descriptors", &[("NAME", name.clone())]);
    let guest = socket();
    until("the engine listens", || rustix::net::connect(&guest, &address(&name)).is_ok());
    // The engine gets its descriptors back once it has reported that it lacks one.
    let client = connect(&name, &client_options(0), || false).unwrap();
    client.close(Duration::ZERO);
    kid.signal(Signal::KILL);
    kid.expect_kill();
}

/// Uses up all descriptors until a refusal is reported for want of one, and then serves.
fn serve_after_a_shortage() {
    let engine = listen(&variable("NAME"), engine_options(1, RING_BYTES));
    let mut held = Vec::new();
    let nofile = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(64), ..nofile }).unwrap();
    while let Ok(fd) = eventfd(0, EventfdFlags::CLOEXEC) {
        held.push(fd);
    }
    until("somebody can't be accepted", || {
        engine.receive(Some(Duration::from_millis(20))).iter().any(|event| {
            matches!(event, EngineEvent::Refused(reason) if reason.contains("Too many open files"))
        })
    });
    drop(held);
    loop {
        engine.receive(None);
    }
}

/// What the processes of these tests are.
#[test]
fn child_main() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let _deadline = Deadline::after(LAST_RESORT, "a child");
    if role == "short of descriptors" {
        serve_after_a_shortage();
    }
    // Nobody but silent guests comes to it.
    assert_eq!(role, "engine");
    let engine = listen(&variable("NAME"), engine_options(1, RING_BYTES));
    loop {
        engine.receive(None);
    }
}

/// A stop interrupts the calls of a process, as a signal does that it handles; that is no reason to
/// begin to wait anew.
#[test]
fn a_silent_guest_is_given_up_by_an_engine_that_is_interrupted() {
    let _deadline = Deadline::after(LAST_RESORT, "an interrupted engine");
    let name = fresh_name("interrupted");
    let mut kid = Kid::spawn("an engine", "engine", &[("NAME", name.clone())]);
    let silent = socket();
    until("the engine listens", || rustix::net::connect(&silent, &address(&name)).is_ok());
    until("the guest is given up", || {
        kid.wait_for_stop(|| kid.signal(Signal::STOP));
        kid.signal(Signal::CONT);
        std::thread::sleep(Duration::from_millis(100));
        is_hung_up(&silent)
    });
    kid.signal(Signal::KILL);
    kid.expect_kill();
}

// ------------------------------------------------------------------------------------
// A client that breaks the memory
// ------------------------------------------------------------------------------------

/// Attaches as client 1 by hand; the connection and the segment.
fn intrude(engine: &EngineRings) -> (OwnedFd, OwnedFd) {
    let guest = knock(engine.name());
    send(&guest, &hello(1, LAYOUT_VERSION, 1, "test"), &[]);
    let (_, mut descriptors) = receive(&guest);
    send(&guest, MARK, &[]);
    (guest, descriptors.swap_remove(0))
}

/// How client 1's link ends.
fn engines_end(engine: &EngineRings, what: &str) -> Option<End> {
    let mut end = None;
    until(&format!("{what}: an end"), || {
        for event in engine.receive(Some(Duration::from_millis(5))) {
            match event {
                EngineEvent::Link { client: 1, event: Event::End(its_end) } => end = Some(its_end),
                EngineEvent::Link { client: 1, event } => panic!("{what}: {event:?}"),
                _ => {}
            }
        }
        end.is_some()
    });
    end
}

#[test]
fn a_client_that_breaks_the_positions_is_cut_off() {
    let _deadline = Deadline::after(LAST_RESORT, "broken positions");
    let ring = RING_BYTES as u64;
    // What the intruder writes where, and whether something is on its way to it.
    let cases = [
        ("a tail beyond the ring", TAIL, ring + 1, false, Corrupt::Position),
        ("a tail far beyond", TAIL, u64::MAX, false, Corrupt::Position),
        ("a tail in the middle", TAIL, u64::MAX / 2, false, Corrupt::Position),
        ("bytes without sense", TAIL, ring, false, Corrupt::Header),
        ("a head beyond the tail", TO_CLIENT + HEAD, ring + 1, true, Corrupt::Position),
        ("a head before the head", TO_CLIENT + HEAD, u64::MAX, true, Corrupt::Position),
    ];
    for (what, offset, value, has_backlog, expected) in cases {
        let house = House::new();
        let (_guest, segment) = intrude(&house.engine);
        until("it attaches", || {
            house.engine.receive(Some(Duration::from_millis(5)));
            house.engine.link(1).is_some()
        });
        if has_backlog {
            house.engine.link(1).unwrap().send(0, &[&[0; 2 * RING_BYTES]], false).unwrap();
        }
        write_u64(&segment, offset, value);
        // It rings nobody; somebody else does.
        house.engine.interrupt();
        assert_eq!(engines_end(&house.engine, what), Some(End::Corrupt(expected)), "{what}");
        // Nothing can be sent to it any more; whatever is said to that, it doesn't stay.
        let _ = house.engine.link(1).unwrap().send(0, &[&[0; 100]], true);
        house.assert_undisturbed(what);
    }
}

/// The engine has seen more than it has read; then the tail claims that this was never sent.
#[test]
fn a_tail_that_goes_back_is_noticed() {
    const NUM_MESSAGES: usize = 66;
    const MESSAGE_BYTES: usize = 40;
    let _deadline = Deadline::after(LAST_RESORT, "a tail that goes back");
    let (producer, mut consumer) = Ring::on_heap(RING_BYTES, 0).split();
    let mut outbox = Outbox::new(producer, Limits::fixed(0));
    for _ in 0..NUM_MESSAGES {
        outbox.send(0, &[b""]).unwrap();
    }
    let mut bytes = vec![0; NUM_MESSAGES * MESSAGE_BYTES];
    assert_eq!(consumer.read(&mut bytes), Ok(bytes.len()));

    let house = House::new();
    let (_guest, segment) = intrude(&house.engine);
    until("it attaches", || {
        house.engine.receive(Some(Duration::from_millis(5)));
        house.engine.link(1).is_some()
    });
    let link = house.engine.link(1).unwrap();
    assert_eq!(rustix::io::pwrite(&segment, &bytes, DATA), Ok(bytes.len()));
    write_u64(&segment, TAIL, bytes.len() as u64);
    assert_eq!(link.receive(64).len(), 64);
    write_u64(&segment, TAIL, 64 * MESSAGE_BYTES as u64 + 8);
    let events = link.receive(64);
    let end = events.last();
    assert!(matches!(end, Some(Event::End(End::Corrupt(Corrupt::Position)))), "{events:?}");
    house.assert_undisturbed("a tail that goes back");
}

// ------------------------------------------------------------------------------------
// An engine that offers the wrong memory
// ------------------------------------------------------------------------------------

/// What a client says to a welcome with this ring size and these descriptors.
fn answer_to(ring_bytes: u64, descriptors: &[&OwnedFd]) -> HandshakeError {
    let name = fresh_name("liar");
    let listener = socket();
    rustix::net::bind(&listener, &address(&name)).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    std::thread::scope(|scope| {
        let client = scope.spawn(|| ClientRings::connect(&name, client_options(0)));
        let guest = rustix::net::accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
        receive(&guest);
        let mut welcome = b"SPRKRING\x00".to_vec();
        welcome.extend(ring_bytes.to_le_bytes());
        send(&guest, &welcome, descriptors);
        client.join().unwrap().expect_err("a client that takes everything")
    })
}

fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
    let fd = memfd_create("wrong", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fcntl_add_seals(&fd, seals).unwrap();
    fd
}

#[test]
fn unfit_memory_is_refused() {
    let _deadline = Deadline::after(LAST_RESORT, "unfit memory");
    let sealed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let ring = RING_BYTES as u64;
    let (_, good) = Segment::create(RING_BYTES).unwrap();
    let (_, bell) = BellPage::create().unwrap();
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let cases = [
        ("no seals", memfd(4096 + 2 * ring, SealFlags::empty()), ring, "sealed"),
        (
            "no seal against growth",
            memfd(4096 + 2 * ring, sealed - SealFlags::GROW),
            ring,
            "sealed",
        ),
        (
            "no seal against shrinking",
            memfd(4096 + 2 * ring, sealed - SealFlags::SHRINK),
            ring,
            "sealed",
        ),
        ("too small", memfd(4095 + 2 * ring, sealed), ring, "size"),
        ("too large", memfd(4097 + 2 * ring, sealed), ring, "size"),
        ("empty", memfd(0, sealed), ring, "size"),
        ("no memory", event.try_clone().unwrap(), ring, "sealed"),
        ("twice the rings", good.try_clone().unwrap(), 2 * ring, "size"),
        ("no rings", good.try_clone().unwrap(), 0, "impossible size"),
        ("rings of an odd size", good.try_clone().unwrap(), ring + 1, "impossible size"),
        ("rings that are too small", good.try_clone().unwrap(), ring / 2, "impossible size"),
        ("rings that are too large", good.try_clone().unwrap(), 1 << 40, "impossible size"),
        ("rings beyond everything", good.try_clone().unwrap(), u64::MAX, "impossible size"),
    ];
    for (what, segment, ring_bytes, expected) in &cases {
        let error = answer_to(*ring_bytes, &[segment, &bell, &event]);
        let is_unfit = matches!(error, HandshakeError::Segment(ShmError::Unfit(_)));
        assert!(is_unfit && error.to_string().contains(expected), "{what}: {error}");
    }
    let error = answer_to(ring, &[&good, &memfd(4096, SealFlags::empty()), &event]);
    assert!(error.to_string().contains("sealed"), "an unsealed bell: {error}");
    let error = answer_to(ring, &[&good, &bell]);
    assert!(matches!(error, HandshakeError::Gibberish), "two descriptors: {error}");
    let error = answer_to(ring, &[]);
    assert!(matches!(error, HandshakeError::Gibberish), "no descriptors: {error}");
}

/// What was sent before a client first looks makes its event descriptor readable, too.
#[test]
fn the_first_look_is_announced() {
    let house = House::new();
    until("it attaches", || {
        house.engine.receive(Some(Duration::from_millis(5)));
        house.engine.link(0).is_some()
    });
    house.engine.link(0).unwrap().send(0, &[b"early"], false).unwrap();
    let start = Instant::now();
    house.inhabitant.wait(Some(PATIENCE));
    assert!(start.elapsed() < PATIENCE, "the event descriptor is not readable");
    assert_eq!(house.inhabitant.receive(16).len(), 1);
}
