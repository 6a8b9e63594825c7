//! Shared memory is there from the beginning: touching it later can't end in SIGBUS.
#![cfg(not(feature = "loom"))]

use rustix::fs::{fstat, ftruncate};
use rustix::io::Errno;
use rustix::param::page_size;
use sparksched_ring::segment::{BellPage, MIN_RING_BYTES, Segment};

/// Also where a page is larger than a ring, or ends in the middle of one.
#[test]
fn all_of_a_segment_is_allocated_when_it_is_made() {
    for ring_bytes in [MIN_RING_BYTES, page_size(), 4 * page_size(), 8 << 20] {
        let (segment, fd) = Segment::create(ring_bytes).unwrap();
        let stat = fstat(&fd).unwrap();
        assert!(stat.st_size.cast_unsigned() > 2 * segment.ring_bytes() as u64);
        assert!(stat.st_blocks * 512 >= stat.st_size, "{} blocks", stat.st_blocks);
        // And nobody can take it away again.
        assert_eq!(ftruncate(&fd, 0), Err(Errno::PERM));
    }
}

#[test]
fn the_page_of_the_bell_is_allocated_when_it_is_made() {
    let (_bell, fd) = BellPage::create().unwrap();
    let stat = fstat(&fd).unwrap();
    assert!(stat.st_blocks * 512 >= stat.st_size);
    assert_eq!(ftruncate(&fd, 0), Err(Errno::PERM));
}
