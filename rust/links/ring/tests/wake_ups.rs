//! Two processes that send each other one message at a time: each reader is about to sleep, or has
//! just fallen asleep, whenever something comes. No wake-up may be lost.
//!
//! A client that loses its wake-up sleeps for ever. An engine finds out by itself after a second, and
//! counts that as a rescue; but it also counts one if its client was about to ring and stood still for
//! a second, as processes do on a busy machine. So each rescue is judged by what the client was doing.
#![cfg(not(feature = "loom"))]

mod common;

use std::cell::RefCell;
use std::hint::spin_loop;
use std::rc::Rc;
use std::time::{Duration, Instant};

use common::{
    Chance, Deadline, Half, Kid, LAST_RESORT, PATIENCE, ROLE, client_options, connect,
    engine_options, fresh_name, listen, note, number, number_or, variable,
};
use rustix::time::{ClockId, clock_gettime};
use sparksched_ring::engine::{EngineEvent, EngineRings};
use sparksched_ring::link::End;
use sparksched_ring::points;

const RING_BYTES: usize = 4096;
/// Turns of the loop that a side waits at most before it answers: about as long as the other one
/// takes to fall asleep.
const MAX_SPINS: u64 = 2000;

/// Times that each side is to be woken, in all: a hundred thousand, unless `SPARKSCHED_WAKE_UPS`
/// wants more or less.
fn num_wake_ups() -> u64 {
    number_or("SPARKSCHED_WAKE_UPS", 100_000)
}

fn limit() -> Duration {
    LAST_RESORT + Duration::from_secs(num_wake_ups() / 1000)
}

fn dawdle(chance: &mut Chance) {
    for _ in 0..chance.below(MAX_SPINS) {
        spin_loop();
    }
}

// ------------------------------------------------------------------------------------
// The client's part
// ------------------------------------------------------------------------------------

/// Noted while the client may be about to ring; otherwise it notes since when it has been waiting.
const AT_WORK: u64 = 0;

/// Milliseconds of the clock that both processes share; never [`AT_WORK`].
fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    1 + now.tv_sec.cast_unsigned() * 1000 + now.tv_nsec.cast_unsigned() / 1_000_000
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
        note(0, AT_WORK);
        for event in client.receive(16) {
            half.take(event);
            dawdle(&mut chance);
            assert!(half.send(client.link(), total), "{half:?}");
        }
        if half.num_received < total {
            note(0, now_ms());
        }
    }
    client.close(PATIENCE);
}

// ------------------------------------------------------------------------------------
// The engine's part
// ------------------------------------------------------------------------------------

/// Judges an engine's rescues on the thread that receives.
struct Judge {
    engine: Rc<EngineRings>,
    kid: Rc<Kid>,
    asleep_since_ms: u64,
    num_judged: u64,
    num_lost_wake_ups: u64,
}

thread_local! {
    static JUDGE: RefCell<Option<Judge>> = const { RefCell::new(None) };
}

impl Judge {
    /// To be called before the engine touches a ring again after a rescue: a client that waits does
    /// so until then.
    fn judge(&mut self) {
        let num_rescues = self.engine.num_rescues();
        if num_rescues == self.num_judged {
            return;
        }
        self.num_judged = num_rescues;
        // It was idle for half of the second at least in which the engine slept, so all that it has
        // sent had been rung for.
        let waiting_since_ms = self.kid.note(0);
        if waiting_since_ms != AT_WORK && waiting_since_ms < self.asleep_since_ms + 500 {
            self.num_lost_wake_ups += 1;
        }
    }
}

/// The points at which the engine's thread touches rings come before what they say is done.
fn attend(point: &str) {
    JUDGE.with_borrow_mut(|judge| {
        let Some(judge) = judge else { return };
        judge.judge();
        if point == "asleep" {
            judge.asleep_since_ms = now_ms();
        }
    });
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
                // On a busy machine, one that tries again.
                EngineEvent::Refused(_) => continue,
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
    points::LISTENER.get_or_init(|| attend);
    let engine = Rc::new(listen(&fresh_name("wake-ups"), engine_options(1, RING_BYTES)));
    let variables = [
        ("NAME", engine.name().to_owned()),
        ("TOTAL", total.to_string()),
        ("MAX_BYTES", max_bytes.to_string()),
    ];
    let kid = Rc::new(Kid::spawn(&what, "client", &variables));
    let judge = Judge {
        engine: Rc::clone(&engine),
        kid: Rc::clone(&kid),
        asleep_since_ms: 0,
        num_judged: 0,
        num_lost_wake_ups: 0,
    };
    JUDGE.set(Some(judge));
    let start = Instant::now();
    play(&engine, total, max_bytes);
    let mut judge = JUDGE.take().expect("set above");
    judge.judge();
    let num_lost_wake_ups = judge.num_lost_wake_ups;
    drop(judge);
    Rc::into_inner(kid).expect("the judge is gone").expect_success();
    let seconds = start.elapsed().as_secs_f64();
    println!("{what}: {seconds:.1} s, {} rescues", engine.num_rescues());
    assert_eq!(num_lost_wake_ups, 0, "{what}: wake-ups were lost");
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
