//! Engine and client in one process: what arrives, and what an end looks like.
#![cfg(not(feature = "loom"))]

use std::time::Duration;

use sparksched_backlog::Limits;
use sparksched_ring::client::{ClientOptions, ClientRings};
use sparksched_ring::engine::{EngineEvent, EngineOptions, EngineRings};
use sparksched_ring::link::{End, Event};
use sparksched_ring::message::Message;

const PATIENCE: Option<Duration> = Some(Duration::from_secs(10));
/// Nobody is to be called stuck, however busy the machine is.
const NEVER_STUCK: Duration = Duration::from_secs(600);

fn engine(name: &str, ring_bytes: usize) -> EngineRings {
    let options = EngineOptions {
        num_clients: 2,
        ring_bytes,
        backlog: Limits::fixed(1 << 20),
        stuck_after: NEVER_STUCK,
        version: "test".to_owned(),
    };
    EngineRings::listen(&format!("sparksched-test-{}-{name}", std::process::id()), options).unwrap()
}

fn client(engine: &EngineRings, client_index: u32) -> ClientRings {
    let options =
        ClientOptions { client_index, stuck_after: NEVER_STUCK, version: "test".to_owned() };
    ClientRings::connect(engine.name(), options).unwrap()
}

/// Events of one link, once at least one is there.
fn engine_events(engine: &EngineRings) -> Vec<Event> {
    loop {
        let events: Vec<_> = engine
            .receive(PATIENCE)
            .into_iter()
            .filter_map(|event| match event {
                EngineEvent::Link { event, .. } => Some(event),
                _ => None,
            })
            .collect();
        if !events.is_empty() {
            return events;
        }
    }
}

fn client_events(client: &ClientRings) -> Vec<Event> {
    loop {
        let events = client.receive(16);
        if !events.is_empty() {
            return events;
        }
        client.wait(PATIENCE);
    }
}

#[test]
fn messages_pass_both_ways() {
    let engine = engine("both-ways", 1 << 16);
    let client = client(&engine, 1);
    assert_eq!(client.link().peer_pid().cast_unsigned(), std::process::id());
    client.link().send(3, &[b"one", b"", b"three"], false).unwrap();
    let events = engine_events(&engine);
    let expected = vec![b"one".to_vec(), Vec::new(), b"three".to_vec()];
    assert!(
        matches!(&events[..], [Event::Message(Message { kind: 3, frames })] if *frames == expected)
    );

    engine.link(1).unwrap().send(4, &[b"back"], false).unwrap();
    let events = client_events(&client);
    assert!(matches!(&events[..], [Event::Message(Message { kind: 4, .. })]));

    client.close(Duration::ZERO);
    let events = engine_events(&engine);
    assert!(matches!(events[..], [Event::End(End::Closed)]), "{events:?}");
    engine.close(Duration::ZERO);
}

#[test]
fn a_message_larger_than_the_ring_passes_in_pieces() {
    let engine = engine("large", 1 << 12);
    let client = client(&engine, 0);
    let large: Vec<u8> = (0..1_000_000u32).map(|i| (i % 251) as u8).collect();
    client.link().send(0, &[&large, b"end"], false).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while client.link().backlog_bytes() > 0 {
                assert!(client.receive(16).is_empty());
                client.wait(Some(Duration::from_millis(100)));
            }
        });
        let events = engine_events(&engine);
        let expected = vec![large.clone(), b"end".to_vec()];
        assert!(matches!(&events[..], [Event::Message(message)] if message.frames == expected));
    });
    engine.close(Duration::ZERO);
    let events = client_events(&client);
    assert!(matches!(events[..], [Event::End(End::Closed)]), "{events:?}");
    client.close(Duration::ZERO);
}
