//! The seeds of all fuzz targets: what libFuzzer has found worth keeping, tried without it.

use std::path::{Path, PathBuf};

use arbitrary::{Arbitrary, Unstructured};
use sparksched_fuzz::{block_hashes, frames, handshake, meters, outputs, packets, segment, zmtp};

/// Each target, and what it does with an input.
macro_rules! targets {
    ($($target:ident: $check:expr,)*) => {
        const TARGETS: &[&str] = &[$(stringify!($target)),*];

        $(
            #[test]
            fn $target() {
                replay(stringify!($target), |bytes| input(bytes).map($check));
            }
        )*
    };
}

targets! {
    block_hashes: |it| block_hashes::check(&it),
    frames: |it| frames::check(&it),
    handshake: |it| handshake::check(&it),
    meters: meters::check,
    outputs: |it| outputs::check(&it),
    packets: packets::check,
    segment: |it| segment::check(&it),
    zmtp: |it| zmtp::check(&it),
}

#[test]
fn no_target_is_left_out() {
    let programs = files_in("fuzz_targets");
    let names: Vec<_> = programs.iter().filter_map(|path| path.file_stem()).collect();
    assert_eq!(names, TARGETS);
}

/// Files in a folder of this crate, in order.
fn files_in(folder: impl AsRef<Path>) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut paths: Vec<_> = folder.read_dir().unwrap().map(|it| it.unwrap().path()).collect();
    paths.sort();
    paths
}

/// Makes an input as libFuzzer's macro does; of some bytes it makes none.
fn input<'a, Input: Arbitrary<'a>>(bytes: &'a [u8]) -> Option<Input> {
    let (min_bytes, _) = Input::size_hint(0);
    let has_enough = bytes.len() >= min_bytes;
    has_enough.then(|| Input::arbitrary_take_rest(Unstructured::new(bytes)).ok()).flatten()
}

fn replay(target: &str, check: impl Fn(&[u8]) -> Option<()>) {
    let mut num_checked = 0;
    for path in files_in(Path::new("seeds").join(target)) {
        // The last one is the one that fails.
        println!("{}", path.display());
        num_checked += check(&std::fs::read(path).unwrap()).iter().len();
    }
    assert!(num_checked > 0, "{target} has no seeds");
}
