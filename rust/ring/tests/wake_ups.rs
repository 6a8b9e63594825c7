//! Two processes that send each other one message at a time: each reader is about to sleep, or has
//! just fallen asleep, whenever something comes. No wake-up may be lost.
#![cfg(not(loom))]

mod common;

use std::hint::spin_loop;
use std::time::{Duration, Instant};

use common::{
    Chance, Deadline, Half, Kid, PATIENCE, ROLE, client_options, connect, engine_options,
    fresh_name, listen, number, variable,
};
use sparksched_ring::engine::{EngineEvent, EngineRings};
use sparksched_ring::link::End;

const RING_BYTES: usize = 4096;
/// Turns of the loop that a side waits at most before it answers: about as long as the other one
/// takes to fall asleep.
const MAX_SPINS: u64 = 2000;

/// Times that each side is to be woken, in all: a hundred thousand, unless `SPARKSCHED_WAKE_UPS`
/// wants more or less.
fn num_wake_ups() -> u64 {
    std::env::var("SPARKSCHED_WAKE_UPS").map_or(100_000, |_| number("SPARKSCHED_WAKE_UPS"))
}

fn limit() -> Duration {
    Duration::from_secs(120 + num_wake_ups() / 1000)
}

fn dawdle(chance: &mut Chance) {
    for _ in 0..chance.below(MAX_SPINS) {
        spin_loop();
    }
}

#[test]
fn child_main() {
    let Ok(role) = std::env::var(ROLE) else { return };
    assert_eq!(role, "client");
    let (total, max_bytes) = (number("TOTAL"), number("MAX_BYTES"));
    let _deadline = Deadline::after(limit(), "a child");
    let client = connect(&variable("NAME"), &client_options(0), || false).unwrap();
    let mut half = Half::of_client(0, max_bytes);
    let mut chance = Chance::new(1);
    while half.num_received < total {
        // Without end: if a wake-up is lost, nothing else gets it out of here.
        client.wait(None);
        for event in client.receive(16) {
            half.take(event);
            dawdle(&mut chance);
            assert!(half.send(client.link(), total), "{half:?}");
        }
    }
    client.close(PATIENCE);
}

/// Sends the next message each time the one before is answered; returns when all are.
fn play(engine: &EngineRings, total: u64, max_bytes: u64) {
    let mut half = Half::of_engine(0, max_bytes);
    let mut chance = Chance::new(2);
    while half.end.is_none() {
        for event in engine.receive(None) {
            match event {
                EngineEvent::Attached { .. } => {}
                EngineEvent::Link { event, .. } => half.take(event),
                EngineEvent::Refused(reason) => panic!("{reason}"),
            }
            if half.num_sent == half.num_received {
                dawdle(&mut chance);
                half.send(engine.link(0).unwrap(), total);
            }
        }
    }
    assert_eq!((half.end, half.num_received), (Some(End::Closed), total));
}

fn no_wake_up_is_lost(total: u64, max_bytes: u64) {
    let what = format!("{total} messages of up to {max_bytes} bytes and as many answers");
    let _deadline = Deadline::after(limit(), &what);
    let engine = listen(&fresh_name("wake-ups"), engine_options(1, RING_BYTES));
    let variables = [
        ("NAME", engine.name().to_owned()),
        ("TOTAL", total.to_string()),
        ("MAX_BYTES", max_bytes.to_string()),
    ];
    let mut kid = Kid::spawn(&what, "client", &variables);
    let start = Instant::now();
    play(&engine, total, max_bytes);
    kid.expect_success();
    println!("{what}: {:.1} s, {} rescues", start.elapsed().as_secs_f64(), engine.num_rescues());
    assert_eq!(engine.num_rescues(), 0, "{what}: wake-ups were lost");
}

#[test]
fn by_messages() {
    no_wake_up_is_lost(num_wake_ups() * 9 / 10, 16);
}

/// Most pass in pieces, so that writers sleep, too, until there is room.
#[test]
fn by_room() {
    no_wake_up_is_lost(num_wake_ups().div_ceil(10), 8 * RING_BYTES as u64);
}
