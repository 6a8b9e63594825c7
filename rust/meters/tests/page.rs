//! The page with an engine's meters: what others see of it, and that they can't change it.

use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::{Mode, OFlags, fstat, ftruncate};
use rustix::io::{Errno, pwrite};
use sparksched_meters::{MeterPage, MeterReader, RingsReading, Traffic};
use sparksched_shm::{PAGE_BYTES, ShmError};

const ID: u128 = 1 << 100 | 7;

fn open(fd: &impl AsFd, id: u128) -> Result<MeterReader, ShmError> {
    MeterReader::open(std::process::id(), fd.as_fd().as_raw_fd().unsigned_abs(), id)
}

#[test]
fn a_reader_sees_what_the_engine_counts() {
    let page = MeterPage::create(ID).unwrap();
    let reader = open(&page, ID).unwrap();
    assert_eq!((reader.steps(), reader.rings()), (None, None));

    let steps = page.meters().steps();
    steps.begin();
    steps.schedule.observe(1000);
    steps.update.observe(2000);
    steps.gap.observe(3000);
    steps.set_requests(4, 5);
    steps.set_waits(&[3, 2]);
    steps.count_queue_timeouts(6);
    let reading = reader.steps().unwrap();
    assert_eq!((reading.num_running, reading.num_waiting), (4, 5));
    assert_eq!((&reading.waiting_for[..3], reading.num_queue_timeouts), (&[3, 2, 0][..], 6));
    assert_eq!((reading.schedule.counts[0], reading.schedule.sum_ns), (1, 1000));
    assert_eq!((reading.update.counts[2], reading.update.sum_ns), (1, 2000));
    assert_eq!((reading.gap.counts[3], reading.gap.sum_ns), (1, 3000));

    let to_engine =
        Traffic { waiting_bytes: 1, high_water_bytes: 2, backlog_bytes: 3, num_without_room: 4 };
    let to_client = Traffic { waiting_bytes: 5, ..to_engine };
    let rings = RingsReading { to_engine, to_client, num_rescues: 6, num_lost: 7 };
    page.meters().set_rings(rings);
    assert_eq!(reader.rings(), Some(rings));
}

#[test]
fn the_page_is_there_from_the_beginning_and_nobody_else_can_write_it() {
    let page = MeterPage::create(ID).unwrap();
    let stat = fstat(&page).unwrap();
    assert!(stat.st_blocks * 512 >= stat.st_size);
    assert_eq!(ftruncate(&page, 0), Err(Errno::PERM));
    assert_eq!(pwrite(&page, &[1], 0), Err(Errno::PERM));
    let path = format!("/proc/self/fd/{}", page.as_fd().as_raw_fd());
    let file = rustix::fs::open(path, OFlags::RDWR, Mode::empty()).unwrap();
    let mapped = memmap2::MmapOptions::new().len(4096).map_raw(&file);
    assert_eq!(mapped.unwrap_err().raw_os_error(), Some(Errno::PERM.raw_os_error()));
}

#[test]
fn what_is_no_page_of_this_engine_is_refused() {
    let page = MeterPage::create(ID).unwrap();
    let refusal = |fd: &dyn AsFdObject| open(&fd, ID).unwrap_err().to_string();
    let other = sparksched_shm::create("other", PAGE_BYTES).unwrap();
    assert!(refusal(&other).contains("another engine"));
    assert!(open(&page, ID + 1).unwrap_err().to_string().contains("another engine"));
    let null = rustix::fs::open("/dev/null", OFlags::RDONLY, Mode::empty()).unwrap();
    assert!(refusal(&null).contains("sealed"));
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    assert!(refusal(&pipe).contains("sealed"), "and opening it doesn't wait for a writer");
    assert!(MeterReader::open(std::process::id(), 1 << 20, ID).is_err());
    assert!(MeterReader::open(u32::MAX, 0, ID).is_err());
}

trait AsFdObject: AsFd {}
impl<T: AsFd> AsFdObject for T {}
