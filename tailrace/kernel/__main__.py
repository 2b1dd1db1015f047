"""Prints which kernel is used: `python -m tailrace.kernel`."""

from tailrace.kernel import IS_COMPILED, KIND

if __name__ == "__main__":
    print(
        f"tailrace: kernel: {KIND}"
        + ("" if IS_COMPILED else "; several times slower (see CONTRIBUTING.md, The kernel)")
    )
