//! Two and more processes under load, with nobody failing: everything arrives, in order, and who
//! doesn't keep up is told so.
#![cfg(not(feature = "loom"))]

mod common;

use std::time::{Duration, Instant};

use common::{
    Deadline, Half, Kid, LAST_RESORT, PATIENCE, ROLE, client_options, connect, engine_options,
    fresh_name, listen, note, number, number_or, until, variable,
};
use sparksched_backlog::Limits;
use sparksched_ring::client::ClientRings;
use sparksched_ring::engine::{EngineEvent, EngineRings};
use sparksched_ring::link::{End, Event};
use sparksched_ring::message::Message;
use sparksched_ring::outbox::SendError;

const NUM_CLIENTS: u32 = 3;
const LARGE_BYTES: usize = 256 << 20;
const BLOCK_BYTES: usize = 1 << 20;

/// Messages in each direction, all clients together, of the longest run: a million, unless
/// `SPARKSCHED_SOAK_MESSAGES` wants more or less.
fn num_messages() -> u64 {
    number_or("SPARKSCHED_SOAK_MESSAGES", 1_000_000)
}

/// No run takes longer.
fn limit() -> Duration {
    LAST_RESORT + Duration::from_secs(num_messages() / 5_000)
}

// ------------------------------------------------------------------------------------
// The child's part
// ------------------------------------------------------------------------------------

#[test]
fn child_main() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let _deadline = Deadline::after(limit(), "a child");
    match &role[..] {
        "client" => be_client(),
        "large" => send_large(),
        "idle" => be_idle(),
        other => panic!("role {other}"),
    }
}

fn be_client() {
    let index = number("INDEX") as u32;
    let (total, max_bytes) = (number("TOTAL"), number("MAX_BYTES"));
    let client = connect(&variable("NAME"), &client_options(index), || false).unwrap();
    let mut half = Half::of_client(index, max_bytes);
    let deadline = Instant::now() + limit();
    loop {
        // Now and then more than the ring and the backlog take.
        while half.send(client.link(), total) {}
        for event in client.receive(16) {
            half.take(event);
        }
        if half.num_sent == total && half.num_received == total {
            break;
        }
        assert_eq!(half.end, None, "client {index}");
        assert!(Instant::now() < deadline, "client {index}: {half:?}");
        // Receiving may have made room for another message; nobody tells of that but itself.
        if !half.send(client.link(), total) {
            client.wait(Some(PATIENCE));
        }
    }
    client.close(PATIENCE);
}

/// A block of the large message.
fn block(index: usize) -> Vec<u8> {
    let mut block = vec![index as u8; BLOCK_BYTES];
    block[..8].copy_from_slice(&(index as u64).to_le_bytes());
    block
}

fn send_large() {
    let options = client_options(0);
    let client = connect(&variable("NAME"), &options, || false).unwrap();
    let mut bytes = Vec::with_capacity(LARGE_BYTES);
    for index in 0..LARGE_BYTES / BLOCK_BYTES {
        bytes.extend_from_slice(&block(index));
    }
    client.link().send(5, &[b"large", &bytes], false).unwrap();
    drop(bytes);
    let mut ends = Vec::new();
    // Its parent says when this has taken too long.
    while client.link().backlog_bytes() > 0 {
        client.wait(Some(Duration::from_secs(1)));
        ends.extend(client.receive(16));
    }
    assert!(ends.is_empty(), "{ends:?}");
    client.close(PATIENCE);
}

/// Times that the threads of this process went to sleep.
fn num_sleeps() -> u64 {
    let mut sum: u64 = 0;
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        // A thread may end while they are listed.
        let status = std::fs::read_to_string(task.unwrap().path().join("status"));
        let status = status.unwrap_or_default();
        let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches"));
        let number = line.and_then(|line| line.split_whitespace().last());
        sum += number.map_or(0, |number| number.parse::<u64>().unwrap());
    }
    sum
}

fn be_idle() {
    let engine = listen(&fresh_name("idle"), engine_options(1, 1 << 16));
    let client = connect(engine.name(), &client_options(0), || false).unwrap();
    // What belongs to the attachment.
    assert_eq!(engine.receive(Some(PATIENCE)).len(), 1);
    assert!(client.receive(16).is_empty());
    let engine_receive = || {
        let start = Instant::now();
        let events = engine.receive(Some(Duration::from_secs(2)));
        assert!(events.is_empty(), "{events:?}");
        assert!(start.elapsed() >= Duration::from_secs(2), "the engine came back early");
        // While this thread is still there to be counted.
        num_sleeps()
    };
    let before = num_sleeps();
    let start = Instant::now();
    let mut num_rounds = 0;
    let after = std::thread::scope(|scope| {
        let engine = scope.spawn(engine_receive);
        while !engine.is_finished() {
            client.wait(Some(Duration::from_secs(1)));
            assert!(client.receive(16).is_empty());
            num_rounds += 1;
        }
        engine.join().unwrap()
    });
    note(0, after.saturating_sub(before));
    note(1, num_rounds);
    note(2, start.elapsed().as_secs());
    client.close(Duration::ZERO);
    engine.close(Duration::ZERO);
}

// ------------------------------------------------------------------------------------
// The tests
// ------------------------------------------------------------------------------------

fn soak(ring_bytes: usize, total: u64, max_bytes: u64) {
    let what = format!("{total} messages of up to {max_bytes} bytes, rings of {ring_bytes}");
    let _deadline = Deadline::after(limit(), &what);
    let engine = listen(&fresh_name("soak"), engine_options(NUM_CLIENTS, ring_bytes));
    let mut kids: Vec<_> = (0..NUM_CLIENTS)
        .map(|index| {
            let variables = [
                ("NAME", engine.name().to_owned()),
                ("INDEX", index.to_string()),
                ("TOTAL", total.to_string()),
                ("MAX_BYTES", max_bytes.to_string()),
            ];
            Kid::spawn(&format!("client {index}: {what}"), "client", &variables)
        })
        .collect();
    let mut halves: Vec<_> =
        (0..NUM_CLIENTS).map(|client| Half::of_engine(client, max_bytes)).collect();
    let start = Instant::now();
    let mut last_event = start;
    while halves.iter().any(|half| half.end.is_none()) {
        for (client, half) in (0..).zip(&mut halves) {
            if let Some(link) = engine.link(client) {
                while half.send(link, total) {}
            }
        }
        // Not for long: receiving may make room for another message, and says nothing of that.
        let events = engine.receive(Some(Duration::from_millis(10)));
        if !events.is_empty() {
            last_event = Instant::now();
        }
        assert!(last_event.elapsed() < PATIENCE, "{what}: nothing for {PATIENCE:?}: {halves:?}");
        for event in events {
            match event {
                EngineEvent::Link { client, event } => halves[client as usize].take(event),
                // Refused is who took too long, on a busy machine; it tries again.
                EngineEvent::Attached { .. } | EngineEvent::Refused(_) => {}
            }
        }
    }
    for (half, kid) in halves.iter().zip(&mut kids) {
        kid.expect_success();
        assert_eq!((half.end, half.num_received), (Some(End::Closed), total), "{what}");
    }
    println!("{what}: {:.1} s", start.elapsed().as_secs_f64());
}

#[test]
fn everything_arrives_through_small_rings() {
    soak(4 << 10, 2000, 12 << 10);
}

#[test]
fn everything_arrives_through_medium_rings() {
    soak(64 << 10, 600, 192 << 10);
}

#[test]
fn everything_arrives_through_large_rings() {
    soak(1 << 20, 2000, 4000);
    soak(1 << 20, 30, 3 << 20);
    soak(8 << 20, 4, 64 << 20);
}

#[test]
fn a_million_messages_arrive() {
    soak(64 << 10, num_messages().div_ceil(NUM_CLIENTS.into()), 100);
}

#[test]
fn a_message_of_256_mib_passes_a_ring_of_8() {
    let _deadline = Deadline::after(LAST_RESORT, "a message of 256 MiB");
    let engine = listen(&fresh_name("large"), engine_options(1, 8 << 20));
    let mut kid = Kid::spawn("a large message", "large", &[("NAME", engine.name().to_owned())]);
    let mut messages = Vec::new();
    let mut end = None;
    while end.is_none() {
        for event in engine.receive(None) {
            match event {
                EngineEvent::Link { event: Event::Message(message), .. } => messages.push(message),
                EngineEvent::Link { event: Event::End(its_end), .. } => end = Some(its_end),
                EngineEvent::Attached { .. } | EngineEvent::Refused(_) => {}
                EngineEvent::Link { event, .. } => panic!("{event:?}"),
            }
        }
    }
    kid.expect_success();
    assert_eq!((messages.len(), end), (1, Some(End::Closed)));
    let frames = &messages[0].frames;
    assert_eq!((messages[0].kind, frames.len(), &frames[0][..]), (5, 2, &b"large"[..]));
    assert_eq!(frames[1].len(), LARGE_BYTES);
    for (index, chunk) in frames[1].chunks(BLOCK_BYTES).enumerate() {
        assert!(chunk == block(index), "block {index} is damaged");
    }
}

fn pair(what: &str, ring_bytes: usize, max_backlog_bytes: usize) -> (EngineRings, ClientRings) {
    let mut options = engine_options(1, ring_bytes);
    options.backlog = Limits::fixed(max_backlog_bytes);
    let engine = listen(&fresh_name(what), options);
    let client = connect(engine.name(), &client_options(0), || false).unwrap();
    until("the client has come", || {
        engine.receive(Some(Duration::from_millis(10)));
        engine.link(0).is_some()
    });
    (engine, client)
}

/// Receives until `count` messages are there; the engine's thread is this one, too.
fn numbers(engine: &EngineRings, client: &ClientRings, count: usize) -> Vec<u64> {
    let mut numbers = Vec::new();
    until(&format!("{count} messages arrive"), || {
        for event in client.receive(16) {
            let Event::Message(message) = event else { panic!("{event:?}") };
            numbers.push(u64::from_le_bytes(message.frames[0][..8].try_into().unwrap()));
        }
        engine.receive(Some(Duration::ZERO));
        numbers.len() >= count
    });
    assert!(client.receive(16).is_empty(), "more than {count} messages");
    numbers
}

fn frame(number: u64) -> Vec<u8> {
    let mut frame = vec![7; 1000];
    frame[..8].copy_from_slice(&number.to_le_bytes());
    frame
}

#[test]
fn a_client_that_does_not_read_fills_the_backlog_and_no_more() {
    const BOUND: usize = 100_000;
    const RING_BYTES: usize = 1 << 16;
    let (engine, client) = pair("backlog", RING_BYTES, BOUND);
    let link = engine.link(0).unwrap();
    let mut num_accepted = 0;
    let mut backlog_bytes = 0;
    loop {
        match link.send(0, &[&frame(num_accepted)], false) {
            Ok(_) => {
                assert!(backlog_bytes < BOUND, "{backlog_bytes} bytes waited already");
                num_accepted += 1;
                backlog_bytes = link.backlog_bytes();
                assert!(backlog_bytes < BOUND + 2000, "{backlog_bytes} bytes wait");
            }
            Err(SendError::Full) => break,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(backlog_bytes >= BOUND, "refused while {backlog_bytes} bytes wait");
    // Frames of 1000 bytes: the ring's worth and the bound's worth.
    assert!((155..170).contains(&num_accepted), "{num_accepted}");
    for _ in 0..1000 {
        assert_eq!(link.send(0, &[&frame(0)], false), Err(SendError::Full));
        assert_eq!(link.backlog_bytes(), backlog_bytes);
    }
    // What must not be refused isn't.
    link.send(0, &[&frame(num_accepted)], true).unwrap();
    num_accepted += 1;
    let expected: Vec<_> = (0..num_accepted).collect();
    assert_eq!(numbers(&engine, &client, expected.len()), expected);
    assert_eq!((link.backlog_bytes(), link.sent_before()), (0, num_accepted));
    // Nothing overtakes what was refused, until somebody says so.
    assert_eq!(link.send(0, &[b"later"], false), Err(SendError::Full));
    link.unblock();
    link.send(0, &[b"later"], false).unwrap();
}

#[test]
fn messages_without_bytes_fill_the_backlog_too() {
    let (engine, client) = pair("empty", 4096, 10_000);
    let link = engine.link(0).unwrap();
    let num_accepted = (0..10_000).take_while(|_| link.send(0, &[b""], false).is_ok()).count();
    assert!((200..1000).contains(&num_accepted), "{num_accepted} empty messages were accepted");
    // And are not forgotten by a goodbye that lingers.
    std::thread::scope(|scope| {
        scope.spawn(|| engine.close(PATIENCE));
        let mut num_received = 0;
        let mut end = None;
        until("all of them arrive", || {
            client.wait(Some(Duration::from_millis(10)));
            for event in client.receive(16) {
                match event {
                    Event::Message(_) => num_received += 1,
                    Event::End(its_end) => end = Some(its_end),
                    other => panic!("{other:?}"),
                }
            }
            end.is_some()
        });
        assert_eq!((num_received, end), (num_accepted, Some(End::Closed)));
    });
}

#[test]
fn what_waits_can_be_taken_back() {
    let (engine, client) = pair("take-back", 4096, 1 << 20);
    let link = engine.link(0).unwrap();
    for number in 0..20 {
        assert_eq!(link.send(9, &[&frame(number)], false).unwrap(), number);
    }
    let first_waiting = link.sent_before();
    assert!((2..6).contains(&first_waiting), "{first_waiting} fit into the ring");
    // What must not be refused must not be lost either.
    assert_eq!(link.send(9, &[&frame(20)], true).unwrap(), 20);
    let expected = [19, 18, 17].map(|number| Message { kind: 9, frames: vec![frame(number)] });
    assert_eq!(link.take_back_newest(3000), expected);
    assert_eq!(link.send(9, &[&frame(21)], false).unwrap(), 21);
    let expected: Vec<_> = (0..22).filter(|it| !(17..20).contains(it)).collect();
    assert_eq!(numbers(&engine, &client, expected.len()), expected);
    assert_eq!((link.take_back_newest(1 << 20), link.backlog_bytes()), (vec![], 0));
}

/// A client that has died with a gigabyte waiting for it mustn't cost the engine a gigabyte.
#[test]
fn what_waits_for_a_client_that_is_gone_is_forgotten() {
    let (engine, client) = pair("gone", 4096, 1 << 20);
    let link = engine.link(0).unwrap();
    for number in 0..20 {
        link.send(0, &[&frame(number)], number % 2 == 0).unwrap();
    }
    assert!(link.backlog_bytes() > 10_000);
    client.close(Duration::ZERO);
    let mut end = None;
    until("the end is noticed", || {
        for event in engine.receive(Some(Duration::from_millis(10))) {
            if let EngineEvent::Link { event: Event::End(its_end), .. } = event {
                end = Some(its_end);
            }
        }
        end.is_some()
    });
    assert_eq!(link.backlog_bytes(), 0);
    assert!(link.sent_before() < 20, "what was forgotten was not sent");
    assert_eq!(link.send(0, &[&frame(20)], true), Err(SendError::Gone));
}

/// More than is received at a time, and all of it before the goodbye.
#[test]
fn what_was_sent_before_a_goodbye_arrives() {
    let (engine, client) = pair("goodbye", 1 << 16, 1 << 20);
    for number in 0..500 {
        client.link().send(0, &[&frame(number)[..8]], false).unwrap();
    }
    client.close(PATIENCE);
    let mut num_received = 0;
    let mut end = None;
    until("the goodbye arrives", || {
        for event in engine.receive(Some(Duration::from_millis(10))) {
            assert_eq!(end, None, "{event:?} after the end");
            match event {
                EngineEvent::Link { event: Event::Message(message), .. } => {
                    assert_eq!(message.frames[0], frame(num_received)[..8]);
                    num_received += 1;
                }
                EngineEvent::Link { event: Event::End(its_end), .. } => end = Some(its_end),
                other => panic!("{other:?}"),
            }
        }
        end.is_some()
    });
    assert_eq!((num_received, end), (500, Some(End::Closed)));
}

/// Counts how often threads go to sleep, in a process of its own: each time one does, it was awake
/// for nothing.
#[test]
fn an_idle_pair_sleeps() {
    let mut kid = Kid::spawn("an idle pair", "idle", &[]);
    kid.expect_success();
    // Two seconds, or as many as it took on a busy machine.
    let (num_sleeps, num_rounds, seconds) = (kid.note(0), kid.note(1), kid.note(2));
    assert!(
        num_sleeps < 25 * seconds,
        "threads went to sleep {num_sleeps} times in {seconds} seconds"
    );
    assert!(
        num_rounds < 5 * seconds,
        "the client's event descriptor was readable {num_rounds} times in {seconds} seconds"
    );
}
