//! Two threads at the two ends of a ring and of a histogram, without a system call: what Miri can run
//! (`make soak KIND=miri`), and the compiler's sanitizer of threads (`make soak KIND=tsan`). Loom's models try more
//! interleavings; here are the real atomics and the real copies.
#![cfg(not(feature = "loom"))]

use std::sync::Arc;
use std::thread;

use sparksched_backlog::Limits;
use sparksched_meters::Histogram;
use sparksched_ring::message::Reader;
use sparksched_ring::outbox::Outbox;
use sparksched_ring::ring::Ring;

/// Miri takes some 10,000 times as long.
const NUM_MESSAGES: u64 = if cfg!(miri) { 10 } else { 100_000 };
/// Less than some messages need, so that they wait and pass in pieces.
const RING_BYTES: usize = 64;

fn frame(number: u64) -> Vec<u8> {
    vec![number as u8; (number % 90) as usize]
}

#[test]
fn messages_pass_from_thread_to_thread() {
    // Positions wrap on the way.
    let (producer, mut consumer) = Ring::on_heap(RING_BYTES, u64::MAX - 100).split();
    let writer = thread::spawn(move || {
        let mut outbox = Outbox::new(producer, Limits::fixed(1 << 20));
        for number in 0..NUM_MESSAGES {
            outbox.send(1, &[&frame(number), &number.to_le_bytes()]).unwrap();
            while !outbox.is_empty() {
                outbox.flush().unwrap();
                thread::yield_now();
            }
        }
        outbox.close();
    });
    let mut reader = Reader::default();
    let mut next = 0;
    loop {
        // Looked at before the last messages are.
        let is_closed = consumer.is_closed();
        while let Some(message) = reader.next(&mut consumer).unwrap() {
            assert_eq!(message.frames, [frame(next), next.to_le_bytes().to_vec()]);
            next += 1;
        }
        consumer.release();
        if is_closed {
            break;
        }
        thread::yield_now();
    }
    assert_eq!(next, NUM_MESSAGES);
    writer.join().unwrap();
}

/// The sum has at least the time of all that was counted.
#[test]
fn a_histogram_is_read_while_it_counts() {
    const NS: u64 = 2000;
    let histogram = Arc::new(Histogram::default());
    let counted = Arc::clone(&histogram);
    let writer = thread::spawn(move || (0..NUM_MESSAGES).for_each(|_| counted.observe(NS)));
    loop {
        let reading = histogram.read();
        let count: u64 = reading.counts.iter().sum();
        assert!(reading.sum_ns >= count * NS, "{count} samples of {} ns together", reading.sum_ns);
        if count == NUM_MESSAGES {
            break;
        }
        thread::yield_now();
    }
    writer.join().unwrap();
}
