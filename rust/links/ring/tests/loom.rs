//! Models of the protocol, of which loom tries all interleavings and all values that a weak memory
//! may show. Run with `cargo test --locked -p sparksched-ring --features loom --test loom`.
//!
//! The rings, bells and outboxes are the real ones. What the kernel does (futex, eventfd) and the
//! loops of `EngineRings::receive`, `ClientRings::receive` and `Link` are repeated here, because
//! they make system calls.

use std::process::Command;
use std::sync::Arc;

use loom::model::Builder;
use loom::sync::{Condvar, Mutex};
use loom::thread;
use sparksched_backlog::Limits;
use sparksched_meters::{Histogram, HistogramReading};
use sparksched_ring::bell::{Alarm, Bell};
use sparksched_ring::message::Reader;
use sparksched_ring::outbox::Outbox;
use sparksched_ring::ring::{Consumer, Producer, Ring};
use sparksched_shm::order;

// ------------------------------------------------------------------------------------
// The kernel's part, and the loops around it
// ------------------------------------------------------------------------------------

/// An engine's bell with a futex: a sleeper compares the word under the lock that the waker takes.
#[derive(Default)]
struct Futex {
    bell: Bell,
    bucket: Mutex<()>,
    sleepers: Condvar,
}

impl Alarm for Futex {
    fn sound(&self) {
        let _bucket = self.bucket.lock().unwrap();
        self.sleepers.notify_one();
    }
}

impl Futex {
    fn ring(&self) {
        self.bell.ring(self);
    }

    fn sleep(&self) {
        let bucket = self.bucket.lock().unwrap();
        if self.bell.is_asleep() {
            drop(self.sleepers.wait(bucket).unwrap());
        }
    }

    /// As `EngineRings::receive`: until `collect` says that it is enough.
    fn until(&self, mut collect: impl FnMut() -> bool, mut has_events: impl FnMut() -> bool) {
        while !collect() {
            self.bell.fall_asleep();
            if !has_events() {
                self.sleep();
            }
            self.bell.wake_up();
        }
    }
}

/// A client's bell with an eventfd.
#[derive(Default)]
struct Eventfd {
    bell: Bell,
    count: Mutex<u64>,
    readable: Condvar,
}

impl Alarm for Eventfd {
    fn sound(&self) {
        *self.count.lock().unwrap() += 1;
        self.readable.notify_one();
    }
}

impl Eventfd {
    fn ring(&self) {
        self.bell.ring(self);
    }

    /// As `ClientRings::wait` and `ClientRings::receive` by turns, until `collect` says that it is
    /// enough.
    fn until(&self, mut collect: impl FnMut() -> bool, mut has_events: impl FnMut() -> bool) {
        loop {
            *self.count.lock().unwrap() = 0;
            loop {
                self.bell.wake_up();
                if collect() {
                    return;
                }
                self.bell.fall_asleep();
                if !has_events() {
                    break;
                }
            }
            let mut count = self.count.lock().unwrap();
            while *count == 0 {
                count = self.readable.wait(count).unwrap();
            }
        }
    }
}

/// Reads one byte, if there is one.
fn read_byte(ring: &mut Consumer) -> Option<u8> {
    let mut byte = [0];
    (ring.read(&mut byte).unwrap() == 1).then_some(byte[0])
}

/// Reads all that is there onto the end of `bytes`.
fn read_all(ring: &mut Consumer, bytes: &mut Vec<u8>) {
    while let Some(byte) = read_byte(ring) {
        bytes.push(byte);
    }
}

/// Bytes that wait for space, as an outbox has them, without headers.
struct Backlog {
    ring: Producer,
    bytes: &'static [u8],
}

impl Backlog {
    fn flush(&mut self) {
        while !self.bytes.is_empty() {
            let written = self.ring.write(self.bytes).unwrap();
            self.bytes = &self.bytes[written..];
            self.ring.publish();
            if !self.bytes.is_empty() && !self.ring.wait_for_space().unwrap() {
                return;
            }
        }
    }

    fn can_go_on(&mut self) -> bool {
        !self.bytes.is_empty() && self.ring.has_space().unwrap()
    }
}

// ------------------------------------------------------------------------------------
// Models of the ring alone: both sides look again and again
// ------------------------------------------------------------------------------------

fn bytes_arrive() {
    let (mut producer, mut consumer) = Ring::on_heap(4, 0).split();
    let writer = thread::spawn(move || {
        assert_eq!(producer.write(&[1, 2]).unwrap(), 2);
        producer.publish();
        assert_eq!(producer.write(&[3]).unwrap(), 1);
        producer.publish();
    });
    let mut bytes = Vec::new();
    while bytes.len() < 3 {
        read_all(&mut consumer, &mut bytes);
        thread::yield_now();
    }
    assert_eq!(bytes, [1, 2, 3]);
    writer.join().unwrap();
}

/// Twice around a ring of two bytes, over the end of the positions' range.
fn space_is_used_again() {
    let (mut producer, mut consumer) = Ring::on_heap(2, u64::MAX - 1).split();
    let writer = thread::spawn(move || {
        let mut rest: &[u8] = &[1, 2, 3, 4];
        while !rest.is_empty() {
            rest = &rest[producer.write(rest).unwrap()..];
            producer.publish();
            thread::yield_now();
        }
    });
    let mut bytes = Vec::new();
    while bytes.len() < 4 {
        read_all(&mut consumer, &mut bytes);
        consumer.release();
        thread::yield_now();
    }
    assert_eq!(bytes, [1, 2, 3, 4]);
    writer.join().unwrap();
}

fn what_is_counted_is_in_the_sum() {
    let histogram = Arc::new(Histogram::default());
    let writer = {
        let histogram = Arc::clone(&histogram);
        thread::spawn(move || {
            histogram.observe(1000);
            histogram.observe(1000);
        })
    };
    let HistogramReading { counts, sum_ns } = histogram.read();
    assert!(sum_ns >= 1000 * counts.iter().sum::<u64>());
    writer.join().unwrap();
}

fn nothing_follows_a_close() {
    let (mut producer, mut consumer) = Ring::on_heap(2, 0).split();
    let writer = thread::spawn(move || {
        producer.write(&[1]).unwrap();
        producer.publish();
        producer.close();
    });
    let is_closed = consumer.is_closed();
    let byte = read_byte(&mut consumer);
    assert!(!is_closed || byte == Some(1), "closed, and then came what was sent before");
    writer.join().unwrap();
    assert!(consumer.is_closed());
}

// ------------------------------------------------------------------------------------
// Models of sleeping and waking: a lost alarm is a deadlock
// ------------------------------------------------------------------------------------

fn a_sleeping_engine_is_woken() {
    let (mut producer, mut consumer) = Ring::on_heap(2, 0).split();
    let futex = Arc::new(Futex::default());
    let writer = thread::spawn({
        let futex = Arc::clone(&futex);
        move || {
            for byte in [1, 2] {
                producer.write(&[byte]).unwrap();
                producer.publish();
                futex.ring();
            }
        }
    });
    receive_two(&futex, &mut consumer);
    writer.join().unwrap();
}

fn receive_two(futex: &Futex, consumer: &mut Consumer) {
    let mut bytes = Vec::new();
    let consumer = std::cell::RefCell::new(consumer);
    futex.until(
        || {
            read_all(&mut consumer.borrow_mut(), &mut bytes);
            bytes.len() == 2
        },
        || consumer.borrow_mut().readable().unwrap() > 0,
    );
    assert_eq!(bytes, [1, 2]);
}

fn a_sleeping_client_is_woken() {
    let (mut producer, consumer) = Ring::on_heap(2, 0).split();
    let eventfd = Arc::new(Eventfd::default());
    let writer = thread::spawn({
        let eventfd = Arc::clone(&eventfd);
        move || {
            for byte in [1, 2] {
                producer.write(&[byte]).unwrap();
                producer.publish();
                eventfd.ring();
            }
        }
    });
    let mut bytes = Vec::new();
    let consumer = std::cell::RefCell::new(consumer);
    eventfd.until(
        || {
            read_all(&mut consumer.borrow_mut(), &mut bytes);
            bytes.len() == 2
        },
        || consumer.borrow_mut().readable().unwrap() > 0,
    );
    assert_eq!(bytes, [1, 2]);
    writer.join().unwrap();
}

/// A reader sleeps until the other side closes, and has then read all that was sent.
fn a_close_wakes() {
    let (mut producer, consumer) = Ring::on_heap(2, 0).split();
    let futex = Arc::new(Futex::default());
    let writer = thread::spawn({
        let futex = Arc::clone(&futex);
        move || {
            producer.write(&[1]).unwrap();
            producer.publish();
            futex.ring();
            producer.close();
            futex.ring();
        }
    });
    let mut bytes = Vec::new();
    let consumer = std::cell::RefCell::new(consumer);
    futex.until(
        || {
            let mut consumer = consumer.borrow_mut();
            // In this order, as `Link::receive`.
            let is_closed = consumer.is_closed();
            read_all(&mut consumer, &mut bytes);
            is_closed
        },
        || {
            let mut consumer = consumer.borrow_mut();
            consumer.readable().unwrap() > 0 || consumer.is_closed()
        },
    );
    assert_eq!(bytes, [1]);
    writer.join().unwrap();
}

/// A writer dies after it has said that it wakes the reader, and before it does. The reader's
/// process notices the death, and another writer's byte is not stuck behind it.
fn a_writer_dies_ringing() {
    struct Dead;
    impl Alarm for Dead {
        fn sound(&self) {}
    }

    let (mut producer, mut consumer) = Ring::on_heap(2, 0).split();
    let futex = Arc::new(Futex::default());
    let dying = thread::spawn({
        let futex = Arc::clone(&futex);
        move || futex.bell.ring(&Dead)
    });
    let writer = thread::spawn({
        let futex = Arc::clone(&futex);
        move || {
            producer.write(&[1, 2]).unwrap();
            producer.publish();
            futex.ring();
        }
    });
    let watcher = thread::spawn({
        let futex = Arc::clone(&futex);
        move || {
            dying.join().unwrap();
            futex.bell.ring_regardless(&*futex);
        }
    });
    receive_two(&futex, &mut consumer);
    writer.join().unwrap();
    watcher.join().unwrap();
}

/// Two clients ring one engine; the bell is rung by whichever sees it asleep.
fn two_writers_share_a_bell() {
    let futex = Arc::new(Futex::default());
    let mut consumers = Vec::new();
    let writers: Vec<_> = [1, 2]
        .map(|byte| {
            let (mut producer, consumer) = Ring::on_heap(2, 0).split();
            consumers.push(consumer);
            let futex = Arc::clone(&futex);
            thread::spawn(move || {
                producer.write(&[byte]).unwrap();
                producer.publish();
                futex.ring();
            })
        })
        .into();
    let mut bytes = Vec::new();
    let consumers = std::cell::RefCell::new(consumers);
    futex.until(
        || {
            for consumer in &mut *consumers.borrow_mut() {
                read_all(consumer, &mut bytes);
            }
            bytes.len() == 2
        },
        || consumers.borrow_mut().iter_mut().any(|consumer| consumer.readable().unwrap() > 0),
    );
    bytes.sort_unstable();
    assert_eq!(bytes, [1, 2]);
    for writer in writers {
        writer.join().unwrap();
    }
}

/// A writer fills the ring, asks for space, and sleeps until the reader wakes it.
fn a_waiting_writer_is_woken() {
    let (producer, mut consumer) = Ring::on_heap(1, 0).split();
    let eventfd = Arc::new(Eventfd::default());
    let writer = thread::spawn({
        let eventfd = Arc::clone(&eventfd);
        move || {
            let backlog = std::cell::RefCell::new(Backlog { ring: producer, bytes: &[1, 2] });
            eventfd.until(
                || {
                    let mut backlog = backlog.borrow_mut();
                    backlog.flush();
                    backlog.bytes.is_empty()
                },
                || backlog.borrow_mut().can_go_on(),
            );
        }
    });
    let mut bytes = Vec::new();
    while bytes.len() < 2 {
        read_all(&mut consumer, &mut bytes);
        if consumer.release() {
            eventfd.ring();
        }
        thread::yield_now();
    }
    assert_eq!(bytes, [1, 2]);
    writer.join().unwrap();
}

/// One thread sends into a full ring while another, which sends the rest once there is space,
/// already sleeps: it didn't look after the first began to wait, so the first has to.
fn a_sender_beside_a_sleeper() {
    let (mut producer, mut consumer) = Ring::on_heap(1, 0).split();
    producer.write(&[1]).unwrap();
    producer.publish();
    let futex = Arc::new(Futex::default());
    // And whether the other byte has been handed over.
    let outbox = Arc::new(Mutex::new((Backlog { ring: producer, bytes: &[] }, false)));
    let sleeper = thread::spawn({
        let (futex, outbox) = (Arc::clone(&futex), Arc::clone(&outbox));
        move || {
            futex.until(
                || {
                    let mut outbox = outbox.lock().unwrap();
                    outbox.0.flush();
                    outbox.1 && outbox.0.bytes.is_empty()
                },
                || {
                    let mut outbox = outbox.lock().unwrap();
                    outbox.0.can_go_on() || (outbox.1 && outbox.0.bytes.is_empty())
                },
            );
        }
    });
    let sender = thread::spawn({
        let (futex, outbox) = (Arc::clone(&futex), Arc::clone(&outbox));
        move || {
            let mut outbox = outbox.lock().unwrap();
            outbox.0.bytes = &[2];
            outbox.1 = true;
            outbox.0.flush();
            let is_sent = outbox.0.bytes.is_empty();
            drop(outbox);
            if is_sent {
                // Only for the model: the sleeper ends when nothing is left to send.
                futex.bell.ring_regardless(&*futex);
            }
        }
    });
    assert_eq!(read_byte(&mut consumer), Some(1));
    if consumer.release() {
        futex.ring();
    }
    sender.join().unwrap();
    sleeper.join().unwrap();
    assert_eq!(read_byte(&mut consumer), Some(2));
}

/// Client and engine send to each other, and the client's bell tells it both of data and of space.
fn a_bell_for_data_and_space() {
    let (to_engine, mut from_client) = Ring::on_heap(1, 0).split();
    let (mut to_client, from_engine) = Ring::on_heap(1, 0).split();
    let eventfd = Arc::new(Eventfd::default());
    let futex = Arc::new(Futex::default());
    let client = thread::spawn({
        let (eventfd, futex) = (Arc::clone(&eventfd), Arc::clone(&futex));
        move || {
            let backlog = std::cell::RefCell::new(Backlog { ring: to_engine, bytes: &[1, 2] });
            let from_engine = std::cell::RefCell::new(from_engine);
            let mut bytes = Vec::new();
            eventfd.until(
                || {
                    let mut backlog = backlog.borrow_mut();
                    if !backlog.bytes.is_empty() {
                        backlog.flush();
                        futex.ring();
                    }
                    read_all(&mut from_engine.borrow_mut(), &mut bytes);
                    backlog.bytes.is_empty() && !bytes.is_empty()
                },
                || {
                    from_engine.borrow_mut().readable().unwrap() > 0
                        || backlog.borrow_mut().can_go_on()
                },
            );
            assert_eq!(bytes, [7]);
        }
    });
    to_client.write(&[7]).unwrap();
    to_client.publish();
    eventfd.ring();
    let mut bytes = Vec::new();
    let from_client = std::cell::RefCell::new(&mut from_client);
    futex.until(
        || {
            let mut from_client = from_client.borrow_mut();
            read_all(&mut from_client, &mut bytes);
            if from_client.release() {
                eventfd.ring();
            }
            bytes.len() == 2
        },
        || from_client.borrow_mut().readable().unwrap() > 0,
    );
    assert_eq!(bytes, [1, 2]);
    client.join().unwrap();
}

/// A whole message, 41 bytes with its header, through a ring of 32 by outbox and reader.
fn a_message_larger_than_the_ring() {
    let (producer, consumer) = Ring::on_heap(32, u64::MAX - 5).split();
    let eventfd = Arc::new(Eventfd::default());
    let futex = Arc::new(Futex::default());
    let writer = thread::spawn({
        let (eventfd, futex) = (Arc::clone(&eventfd), Arc::clone(&futex));
        move || {
            let outbox = std::cell::RefCell::new(Outbox::new(producer, Limits::fixed(100)));
            outbox.borrow_mut().send(9, &[b"x"]).unwrap();
            futex.ring();
            eventfd.until(
                || {
                    let mut outbox = outbox.borrow_mut();
                    if !outbox.is_empty() {
                        outbox.flush().unwrap();
                        futex.ring();
                    }
                    outbox.is_empty()
                },
                || outbox.borrow_mut().can_go_on(),
            );
        }
    });
    let inbox = std::cell::RefCell::new((consumer, Reader::default()));
    let mut messages = Vec::new();
    futex.until(
        || {
            let (consumer, reader) = &mut *inbox.borrow_mut();
            messages.extend(reader.next(consumer).unwrap());
            if consumer.release() {
                eventfd.ring();
            }
            messages.len() == 1
        },
        || inbox.borrow_mut().0.readable().unwrap() > 0,
    );
    assert_eq!((messages[0].kind, &messages[0].frames[..]), (9, &[b"x".to_vec()][..]));
    writer.join().unwrap();
}

// ------------------------------------------------------------------------------------
// The tests
// ------------------------------------------------------------------------------------

/// A test for each model, and how many preemptions loom tries in it (`all`: any number). A switch at a
/// blocking call or a yield is not a preemption.
macro_rules! models {
    ($($name:ident: $preemptions:tt;)*) => {
        const MODELS: &[Model] = &[
            $(Model {
                name: stringify!($name),
                preemptions: models!(@ $preemptions),
                run: $name,
            }),*
        ];

        mod holds {
            $(#[test]
            fn $name() {
                super::model(stringify!($name)).check();
            })*
        }
    };
    (@ all) => { None };
    (@ $preemptions:literal) => { Some($preemptions) };
}

/// A test for each ordering: the model named here fails if it is weakened.
macro_rules! refutations {
    ($($ordering:ident: $model:ident;)*) => {
        const REFUTED: &[&str] = &[$(stringify!($ordering)),*];

        mod is_needed {
            $(#[test]
            fn $ordering() {
                super::assert_fails_without(stringify!($ordering), stringify!($model));
            })*
        }
    };
}

models! {
    bytes_arrive: all;
    space_is_used_again: all;
    what_is_counted_is_in_the_sum: 3;
    nothing_follows_a_close: all;
    a_sleeping_engine_is_woken: 8;
    a_sleeping_client_is_woken: 8;
    a_close_wakes: 8;
    a_writer_dies_ringing: 3;
    a_waiting_writer_is_woken: 8;
    a_sender_beside_a_sleeper: 5;
    two_writers_share_a_bell: 4;
    a_bell_for_data_and_space: 5;
    a_message_larger_than_the_ring: 5;
}

refutations! {
    publish_tail: bytes_arrive;
    observe_tail: bytes_arrive;
    release_head: space_is_used_again;
    observe_head: space_is_used_again;
    publish_close: nothing_follows_a_close;
    observe_close: nothing_follows_a_close;
    before_ringing: a_sleeping_engine_is_woken;
    before_sleep: a_sleeping_engine_is_woken;
    before_space_check: a_waiting_writer_is_woken;
    before_waiting: a_sender_beside_a_sleeper;
    count_sample: what_is_counted_is_in_the_sum;
    observe_sample: what_is_counted_is_in_the_sum;
}

struct Model {
    name: &'static str,
    preemptions: Option<usize>,
    run: fn(),
}

fn model(name: &str) -> &'static Model {
    MODELS.iter().find(|model| model.name == name).unwrap()
}

impl Model {
    /// At most as many preemptions as `SPARKSCHED_LOOM_PREEMPTIONS`, if that is set.
    fn check(&self) {
        let most = std::env::var("SPARKSCHED_LOOM_PREEMPTIONS").ok();
        let most = most.map(|text| text.parse().expect("SPARKSCHED_LOOM_PREEMPTIONS is a number"));
        let mut builder = Builder::new();
        builder.preemption_bound =
            self.preemptions.map(|preemptions| preemptions.min(most.unwrap_or(usize::MAX)));
        builder.max_branches = 10_000;
        builder.check(self.run);
    }
}

/// Names the ordering to weaken and the model to check, in a child of this process: after a failed
/// check, loom's objects must not be dropped, and they can't be kept from it.
const CHILD: &str = "SPARKSCHED_LOOM_CHILD";
/// How loom and the models say that they failed; a child that ends in another way is an error.
const FAILURES: &[&str] = &[
    "deadlock",
    "Causality violation",
    "Concurrent",
    "assertion",
    "closed, and then came",
    "Model exceeded maximum number of branches",
];

#[test]
fn every_ordering_is_weakened_in_a_test() {
    assert_eq!(REFUTED, order::ALL, "the orderings, and those that `refutations!` names");
}

/// Checks a model with an ordering weakened: it fails, and in a way that a model fails.
fn assert_fails_without(ordering: &str, model: &str) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "weakened_child", "--nocapture"])
        .env(CHILD, format!("{ordering} {model}"))
        .output()
        .unwrap();
    assert!(!output.status.success(), "{model} holds with {ordering} weakened: is it needed?");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        FAILURES.iter().any(|failure| text.contains(failure)),
        "{model} with {ordering} weakened ended in an unknown way:\n{text}"
    );
}

/// The child's part of [`assert_fails_without`].
#[test]
fn weakened_child() {
    let Ok(child) = std::env::var(CHILD) else { return };
    let (ordering, name) = child.split_once(' ').unwrap();
    let ordering = order::ALL.iter().find(|name| **name == ordering).unwrap();
    order::weaken(Some(ordering));
    model(name).check();
}
