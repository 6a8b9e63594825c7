#!/usr/bin/env bash
# Lets vLLM's CPU build for aarch64 be imported beside the package index's PyTorch: testkit/sbgemm.sh PYTHON
#
# That build was linked with a PyTorch whose OpenBLAS has `sbgemm_`, which multiplies matrices of bfloat16.
# The package index's lacks it. Tests compute in float32 and never call it, so one that ends the process does.
set -euo pipefail

site=$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cc -shared -fPIC -x c -o "$site/libsbgemm.so" - <<'C'
#include <stdio.h>
#include <stdlib.h>
void sbgemm_(void) {
    fputs("this PyTorch can't multiply matrices of bfloat16 (testkit/sbgemm.sh): use float32\n", stderr);
    abort();
}
C
printf 'import ctypes; ctypes.CDLL("%s/libsbgemm.so", ctypes.RTLD_GLOBAL)\n' "$site" >"$site/sbgemm.pth"
