//! A watcher thread that panics: nobody would learn of a death any more, so its links end.
#![cfg(not(feature = "loom"))]

mod common;

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use common::{
    Deadline, Holdings, LAST_RESORT, client_options, connect, engine_options, fresh_name, listen,
    until,
};
use sparksched_ring::client::ClientRings;
use sparksched_ring::engine::{EngineEvent, EngineOptions};
use sparksched_ring::link::{End, Event};
use sparksched_ring::points;

const RING_BYTES: usize = 4096;
/// A watcher makes a round in a fraction of this.
const STUCK_AFTER: Duration = Duration::from_secs(1);

static IS_ARMED: AtomicBool = AtomicBool::new(false);

/// Of all watchers of this process one at a time panics.
fn panic_when_armed(point: &str) {
    assert!(point != points::WATCHING || !IS_ARMED.swap(false, Relaxed), "a test wants this panic");
}

fn end_of(client: &ClientRings) -> Option<End> {
    client.receive(64).into_iter().find_map(|event| match event {
        Event::End(end) => Some(end),
        _ => None,
    })
}

#[test]
fn links_end_with_the_thread_that_watches_them() {
    let _deadline = Deadline::after(LAST_RESORT, "broken watchers");
    points::HOOK.set(panic_when_armed).unwrap();
    let holdings = Holdings::now();
    for _ in 0..4 {
        let name = fresh_name("broken-watcher");
        let options = EngineOptions { stuck_after: STUCK_AFTER, ..engine_options(2, RING_BYTES) };
        let engine = listen(&name, options);
        let client = connect(&name, &client_options(0), || false).unwrap();
        // Whichever of the two it is that panics: both sides see the end, and neither a death.
        IS_ARMED.store(true, Relaxed);
        let mut of_client = None;
        until("the client sees an end", || {
            of_client = of_client.or_else(|| end_of(&client));
            of_client.is_some()
        });
        let mut of_engine = None;
        until("the engine sees an end", || {
            for event in engine.receive(Some(Duration::from_millis(1))) {
                if let EngineEvent::Link { event: Event::End(end), .. } = event {
                    of_engine = Some(end);
                }
            }
            of_engine.is_some()
        });
        let ends = (of_client.unwrap(), of_engine.unwrap());
        assert!(
            matches!(ends, (End::HungUp, End::Closed) | (End::Closed, End::HungUp)),
            "{ends:?}"
        );
        if of_engine == Some(End::HungUp) {
            // Nobody could be watched: nobody is let in.
            assert!(ClientRings::connect(&name, client_options(1)).is_err());
        }
    }
    holdings.assert_unchanged("after broken watchers");
}
