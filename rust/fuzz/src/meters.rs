//! A page of meters that somebody else has made: whatever lies there, a reader gets the numbers that lie
//! there, or none.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use sparksched_meters::{HistogramReading, MAX_WAIT_REASONS, MeterReader, NUM_BUCKETS, Traffic};

const PAGE_BYTES: usize = 4096;
/// Where the scheduler's part and the rings' begin, in words; a flag says whether they are there.
const STEPS: usize = 128 / 8;
const RINGS: usize = 1536 / 8;

fn memory_with(page: &[u8]) -> OwnedFd {
    let memory = memfd_create("fuzz", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&memory, PAGE_BYTES as u64).unwrap();
    rustix::io::pwrite(&memory, page, 0).unwrap();
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
    memory
}

fn check_histogram(reading: &HistogramReading, words: &[u64]) {
    assert_eq!(reading.sum_ns, words[0]);
    assert_eq!(reading.counts, words[1..=NUM_BUCKETS]);
}

fn check_traffic(traffic: Traffic, words: &[u64]) {
    let Traffic { waiting_bytes, high_water_bytes, backlog_bytes, num_without_room } = traffic;
    assert_eq!([waiting_bytes, high_water_bytes, backlog_bytes, num_without_room], words[..4]);
}

/// Reads a page that begins with these bytes.
pub fn check(content: &[u8]) {
    let mut page = content[..content.len().min(PAGE_BYTES)].to_vec();
    page.resize(PAGE_BYTES, 0);
    let words: Vec<_> =
        page.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    let memory = memory_with(&page);
    let open = |id| MeterReader::open(std::process::id(), memory.as_raw_fd().unsigned_abs(), id);

    let id = u128::from(words[1]) << 64 | u128::from(words[0]);
    assert!(open(id ^ 1).is_err(), "another engine's page is taken");
    let reader = open(id).unwrap();
    let steps = reader.steps();
    assert_eq!(steps.is_some(), words[STEPS] == 1);
    if let Some(steps) = steps {
        let part = |index: usize| &words[STEPS + 1 + index * (1 + NUM_BUCKETS)..];
        check_histogram(&steps.schedule, part(0));
        check_histogram(&steps.update, part(1));
        check_histogram(&steps.gap, part(2));
        assert_eq!([steps.num_running, steps.num_waiting], part(3)[..2]);
        assert_eq!(steps.waiting_for, part(3)[2..2 + MAX_WAIT_REASONS]);
        assert_eq!(steps.num_queue_timeouts, part(3)[2 + MAX_WAIT_REASONS]);
    }
    let rings = reader.rings();
    assert_eq!(rings.is_some(), words[RINGS] == 1);
    if let Some(rings) = rings {
        check_traffic(rings.to_engine, &words[RINGS + 1..]);
        check_traffic(rings.to_client, &words[RINGS + 5..]);
        assert_eq!([rings.num_rescues, rings.num_lost], words[RINGS + 9..RINGS + 11]);
    }
}
