//! Lets cargo-mutants, which runs Rust tests alone, ask the differential suite: `make mutants`.
//!
//! `PYO3_PYTHON` names a Python with vLLM. Short: a mutant is wrong in most scenarios.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// All configurations for a short time, and the one with the most special cases for longer.
const SCENARIOS: [&[&str]; 2] = [
    &["--seeds", "0:1", "--steps", "80"],
    &["--config", "states-by-eagle", "--seeds", "0:6", "--steps", "150"],
];

#[test]
#[ignore = "needs vLLM, and minutes"]
fn decisions_are_those_of_vllm() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let scratch = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let package = ["-p", "sparksched-python", "--features", "pyo3/extension-module"];
    run(Command::new(env!("CARGO")).args(["build", "--locked"]).args(package).current_dir(&root));

    // A package beside the tree's, whose extension stays as it is.
    let ours = scratch.join("sparksched");
    let _ = fs::remove_dir_all(&ours);
    run(Command::new("cp").arg("-r").arg(root.join("python/sparksched")).arg(&ours));
    let library = scratch.join("../debug/libsparksched_core_python.so");
    fs::copy(library, ours.join("_core.abi3.so")).expect("the library has been built");

    let python = std::env::var_os("PYO3_PYTHON").expect("PYO3_PYTHON is set");
    for scenarios in SCENARIOS {
        run(Command::new(&python)
            .args(["-m", "tests.differential"])
            .args(scenarios)
            .current_dir(&root)
            .env("PYTHONPATH", &scratch));
    }
}

fn run(command: &mut Command) {
    let status = command.status().expect("the program can be run");
    let program = command.get_program();
    assert!(status.success(), "{}: {status}", Path::new(OsStr::new(program)).display());
}
