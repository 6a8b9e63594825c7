#!/usr/bin/env bash
# Arm without an Arm processor: builds and tests for aarch64 on an x86-64 Debian, under qemu-user.
#
#   testkit/arm.sh wheel DIR       a wheel for aarch64, built where no rustup can add that target
#   testkit/arm.sh import WHEEL    imports it where nothing else is installed
#   testkit/arm.sh test [PART...]  rust, pages, wheel, unit, differential, engine; all by default
#
# It needs root, for chroot and binfmt_misc, and 15 GB in ARM_ROOTS. Packages come from where apt, pip and
# cargo of this machine have theirs. Each part leaves a mark when it has passed: another call with the
# same sources goes on behind it. Nothing stays mounted; the kernel keeps the emulator's registration.
#
# What it can't show. Memory order: qemu on x86-64 orders memory as x86-64 does. Pages of 64 KiB: programs have
# the host's of 4 KiB, but for `pages`, where Debian's kernel has 16 KiB. Speed.
set -euo pipefail

cd "$(dirname "$0")/.."
ROOTS=${ARM_ROOTS:-$PWD/.arm}
BUILDER=$ROOTS/builder # x86-64: Debian's Rust, with the standard library for aarch64
GUEST=$ROOTS/guest     # aarch64: Python 3.11, and vLLM for the parts that need it
MACHINE=$ROOTS/machine # x86-64: qemu for a whole machine, and aarch64's kernel with larger pages
SOURCES=$ROOTS/sources # bound to /src in both
TARGET=aarch64-unknown-linux-gnu
PARTS=(rust pages wheel unit differential engine)
# The first Debian whose Rust is new enough, and the one with the Python of `make env`.
BUILDER_SUITE=forky GUEST_SUITE=bookworm
# How much longer a test may take than on a processor of its own.
PATIENCE=5
PARALLEL=(-n 2 --dist loadfile --no-loadscope-reorder)

fail() { echo "arm.sh: $*" >&2; exit 2; }

check_machine() {
    [ "$(uname -m)" = x86_64 ] || fail "this is $(uname -m); on an Arm machine run make test"
    grep -qs '^ID=debian' /etc/os-release || fail "it takes packages of Debian, and this is another system"
    [ "$(id -u)" = 0 ] || fail "it needs root, for chroot and binfmt_misc"
    command -v mmdebstrap >/dev/null || fail "mmdebstrap is needed: apt-get install mmdebstrap"
    mkdir -p "$ROOTS"
    exec 9>"$ROOTS/lock"
    flock --nonblock 9 || fail "another run works in $ROOTS"
}

timed() { # WHAT COMMAND...
    local what=$1 start=$SECONDS
    shift
    "$@"
    echo "== aarch64: $what: $((SECONDS - start)) s"
}

# ----------------------------------------------------------------------------------------
# Two roots
# ----------------------------------------------------------------------------------------

# Mirrors keep a suite whose Release file has expired.
bootstrap() { # SUITE ROOT OPTION...
    local suite=$1 root=$2 mirror
    shift 2
    mirror=$(awk '/^URIs:/ { print $2; exit } /^deb / { print $(NF > 4 && $2 ~ /^\[/ ? 3 : 2); exit }' \
        /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null || true)
    [ -n "$mirror" ] || fail "apt's configuration names no mirror of Debian"
    rm -rf "$root"
    mmdebstrap --quiet --aptopt='Acquire::Check-Valid-Until "false"' \
        --aptopt='APT::Install-Recommends "false"' "$@" "$suite" "$root" "$mirror"
}

# Mounts end with the namespace. Crates come from this machine's cargo, so no root needs a network.
inside() { # ROOT SCRIPT [NAME=VALUE...]
    local root=$1 script=$2
    shift 2
    mkdir -p "$root/src" "$root/cargo" "$SOURCES"
    # shellcheck disable=SC2016
    unshare --mount --propagation private bash -ec '
        root=$1 script=$2 sources=$3 cargo=$4
        shift 4
        mount -t proc proc "$root/proc"
        mount -t sysfs -o ro sysfs "$root/sys"
        mount --rbind /dev "$root/dev"
        mount --bind "$sources" "$root/src"
        mount --bind "$cargo" "$root/cargo"
        exec chroot "$root" env -i HOME=/root LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin \
            QEMU_CPU=max CARGO_HOME=/cargo CARGO_TARGET_DIR=/target CARGO_NET_OFFLINE=true "$@" \
            bash -ec "cd /src; $script"' \
        bash "$root" "$script" "$SOURCES" "${CARGO_HOME:-$HOME/.cargo}" "$@"
}

build_builder() {
    local tools
    read -ra tools < <(wheel_tools)
    bootstrap "$BUILDER_SUITE" "$BUILDER" --variant=apt --architectures=amd64,arm64 \
        --include=rustc,cargo,libstd-rust-dev:arm64,gcc,libc6-dev,python3 \
        --include=gcc-aarch64-linux-gnu,libc6-dev-arm64-cross,libgcc-s1:arm64,qemu-user
    python3 -m pip install --quiet --root-user-action=ignore --no-deps --target "$BUILDER/opt/tools" "${tools[@]}"
    touch "$BUILDER/.complete"
}

# The versions that `make wheel` uses.
wheel_tools() { sed -n 's/^WHEEL_TOOLS := --with //p' Makefile | tr '@' ' ' | awk '{ print $1, $2 "==" $3 }'; }

# The builder's qemu is static. `F` opens it at once, so that any root finds it; `P` keeps argv[0].
register_emulator() {
    local formats=/proc/sys/fs/binfmt_misc
    [ -e $formats/status ] || mount -t binfmt_misc binfmt_misc $formats
    [ ! -e $formats/qemu-aarch64 ] || return 0
    printf ':qemu-aarch64:M::%s:%s:%s:PF' \
        '\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00' \
        '\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff' \
        "$BUILDER/usr/bin/qemu-aarch64" >$formats/register
}

build_guest() {
    bootstrap "$GUEST_SUITE" "$GUEST" --variant=minbase --architectures=arm64 \
        --include=python3,python3-dev,libgomp1,libstdc++6,libnuma1,gcc,g++,libc6-dev,git,procps
    touch "$GUEST/.complete"
}

# pip works outside, where it is fast. It reads markers for this machine, so what only an x86-64 needs is
# left out here, and so are linters.
build_vllm() {
    local site=$GUEST/usr/local/lib/python3.11/dist-packages glibc
    local only=(--no-deps --only-binary=:all: --python-version 311 --implementation cp
        --abi cp311 --abi abi3 --abi none
        --platform any --platform linux_aarch64 --platform manylinux2014_aarch64)
    for glibc in {17..36}; do only+=(--platform "manylinux_2_${glibc}_aarch64"); done
    mkdir -p "$ROOTS/wheels" "$site"
    grep -vE '^(\./|intel|ruff|mypy|actionlint|zizmor)' requirements-dev.txt >"$ROOTS/requirements.txt"
    python3 -m pip download --quiet --dest "$ROOTS/wheels" "${only[@]}" -r "$ROOTS/requirements.txt"
    python3 -m pip wheel --quiet --no-deps --wheel-dir "$ROOTS/wheels" ./testkit/vllm-cpu-name
    python3 -m pip install --quiet --root-user-action=ignore --no-index --no-compile "${only[@]}" \
        --target "$site" "$ROOTS"/wheels/*.whl
    inside "$GUEST" "testkit/sbgemm.sh python3"
    touch "$GUEST/.vllm"
}

# Unpacked, not set up: nothing but qemu runs in it.
build_machine() {
    bootstrap "$BUILDER_SUITE" "$MACHINE" --variant=extract --architectures=amd64,arm64 \
        --include=qemu-system-arm,linux-image-arm64-16k:arm64 \
        --include=busybox-static:arm64,libc6:arm64,libgcc-s1:arm64,cpio
    ln -s usr/lib usr/lib64 usr/bin "$MACHINE/"
    mkdir -p "$MACHINE"/{proc,sys}
    touch "$MACHINE/.complete"
}

need() { # builder|guest|machine
    local root=$ROOTS/$1
    [ -e "$root/.complete" ] || timed "$1 set up" "build_$1"
    [ "$1" != builder ] || register_emulator
}

# ----------------------------------------------------------------------------------------
# Sources, and which parts have passed with them
# ----------------------------------------------------------------------------------------

# The working tree, without what git ignores. The page with the verdicts of runs doesn't change what they find.
copy_sources() {
    local files=$ROOTS/files key
    git ls-files -z --cached --others --exclude-standard >"$files"
    key=$(grep -zv '^docs/promises.md$' "$files" | tar -c --null --files-from=- --ignore-failed-read \
        --sort=name --mtime=@0 --owner=0 --group=0 2>/dev/null | sha256sum | cut -d' ' -f1)
    PASSED=$ROOTS/passed/$key
    [ ! -d "$PASSED" ] || return 0
    rm -rf "$SOURCES" "$ROOTS/passed"
    mkdir -p "$SOURCES"
    tar -c --null --files-from="$files" --ignore-failed-read 2>/dev/null | tar -x -C "$SOURCES"
    cargo fetch --locked --quiet --manifest-path "$SOURCES/Cargo.toml"
    mkdir -p "$PASSED"
}

# ----------------------------------------------------------------------------------------
# Parts
# ----------------------------------------------------------------------------------------

# Built by cross compilation. The runner gets the path of each test program.
cargo_test() { # RUNNER ARGUMENT...
    local runner=$1
    shift
    inside "$BUILDER" "cargo test --locked --quiet --no-run --target $TARGET $*
        cargo test --locked --no-fail-fast --target $TARGET $*" \
        CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
        CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="$runner"
}

part_rust() {
    need builder
    cargo_test "timeout 900" --package=sparksched-{backlog,core,wire,zmtp,ring,meters,shm,fuzz} \
        --features sparksched-ring/test-points
}

# What maps memory and makes sockets, on a kernel whose pages are not those of x86-64.
part_pages() {
    need builder
    need machine
    local image=$MACHINE/image log=$ROOTS/machine.log kernel
    rm -rf "$BUILDER/target/pages" "$image"
    mkdir -p "$BUILDER/target/pages" "$image"/{bin,dev,lib,proc,sys,tmp}
    cargo_test "cp -t /target/pages" --package=sparksched-{zmtp,ring,meters,shm} --features sparksched-ring/test-points --lib \
        --test page --test properties --test refusals >/dev/null
    mv "$BUILDER/target/pages" "$image/tests"
    cp "$MACHINE/usr/bin/busybox" "$image/bin/"
    cp "$MACHINE"/usr/lib/aarch64-linux-gnu/lib{c,m,gcc_s}.so.* "$MACHINE"/usr/lib/ld-linux-aarch64.so.1 "$image/lib/"
    cat >"$image/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev; mount -t tmpfs tmpfs /tmp
ip link set lo up
grep -m1 KernelPageSize /proc/self/smaps
for test in /tests/*; do
    echo "Running $test"
    PROPTEST_CASES=64 $test || failed=yes
done
[ -n "$failed" ] || echo "ALL PASSED"
poweroff -f
INIT
    chmod +x "$image/init"
    (cd "$image" && find .) | chroot "$MACHINE" /usr/bin/cpio --quiet -o -H newc -D /image >"$MACHINE/image.cpio"
    kernel=$(echo "$MACHINE"/usr/lib/modules/*/vmlinuz)
    timeout 1800 chroot "$MACHINE" /usr/bin/qemu-system-aarch64 -machine virt -cpu max -smp 2 -m 2G \
        -nographic -no-reboot -kernel "${kernel#"$MACHINE"}" -initrd /image.cpio -append "quiet panic=-1" \
        </dev/null | tee "$log"
    grep -q "ALL PASSED" "$log"
}

part_wheel() {
    need builder
    rm -rf "$ROOTS/dist"
    mkdir -p "$ROOTS/dist"
    build_wheel "$ROOTS/dist"
    import_wheel "$ROOTS"/dist/*.whl
}

build_wheel() { # DIR
    rm -rf "$BUILDER/target/dist"
    inside "$BUILDER" "maturin build --locked --release --zig --target $TARGET \
        --compatibility manylinux_2_28 --out /target/dist" \
        PATH=/opt/tools/bin:/usr/bin:/bin PYTHONPATH=/opt/tools PYO3_NO_PYTHON=1
    cp "$BUILDER"/target/dist/*.whl "$1/"
}

# Without `site`, so that no other package is in reach.
import_wheel() { # WHEEL
    need guest
    rm -rf "$GUEST/wheel"
    python3 -m zipfile -e "$1" "$GUEST/wheel"
    inside "$GUEST" 'cd /wheel; python3 -S -c "
import platform, sparksched._core
print(sparksched._core.__file__, platform.machine())"'
}

run_pytest() { # ARGUMENT...
    local site=/usr/local/lib/python3.11/dist-packages
    need guest
    [ -e "$GUEST/.vllm" ] || timed "vLLM set up" build_vllm
    rm -rf "$GUEST$site"/sparksched*
    python3 -m zipfile -e "$ROOTS"/dist/*.whl "$GUEST$site"
    inside "$GUEST" "python3 -m pytest -p no:cacheprovider $*" \
        PYTHONHASHSEED=0 SPARKSCHED_TEST_PATIENCE=$PATIENCE \
        VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1
}

part_unit() { run_pytest -q "${PARALLEL[@]}" tests/unit; }

# As large as in `make test`, but without the planted errors, vLLM's other release and what verifies: they
# test the comparison, which is the same Python on all processors.
part_differential() {
    run_pytest -q "${PARALLEL[@]}" tests/differential/test_differential.py tests/differential/test_reused_id.py
}

# vLLM with its own scheduler, and with ours.
part_engine() { run_pytest -v tests/e2e/test_offline.py -k vectors; }

test_parts() {
    local part
    copy_sources
    for part in "$@"; do
        [[ " ${PARTS[*]} " = *" $part "* ]] || fail "unknown part: $part"
        if [ -e "$PASSED/$part" ]; then
            echo "== aarch64: $part has passed with these sources"
            continue
        fi
        [[ "rust pages wheel" = *"$part"* ]] || [ -e "$PASSED/wheel" ] || fail "$part needs the wheel first"
        timed "$part" "part_$part"
        touch "$PASSED/$part"
    done
}

command=${1:-}
shift || true
case $command in
wheel)
    check_machine
    copy_sources
    need builder
    build_wheel "$1"
    ;;
import)
    check_machine
    need builder
    import_wheel "$1"
    ;;
test)
    check_machine
    [ $# -gt 0 ] || set -- "${PARTS[@]}"
    test_parts "$@"
    ;;
*) fail "usage: testkit/arm.sh wheel DIR | import WHEEL | test [PART...]" ;;
esac
