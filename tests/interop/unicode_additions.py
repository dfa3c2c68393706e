#!/usr/bin/env python3
"""Writes train/tokenizer/unicode_additions.h: the characters on which Debian 12's PCRE2 and utf8proc differ from
the library tokenizers.

  pip install tokenizers
  tests/interop/unicode_additions.py >train/tokenizer/unicode_additions.h

It needs libutf8proc.so.2 and a Python whose unicodedata has Unicode 14, like PCRE2 10.42: Python 3.11.
"""
import ctypes
import sys
import unicodedata

from tokenizers import Regex, normalizers, pre_tokenizers

HEADER = '''\
// What tokenizers and tiktoken know of Unicode, and Debian 12's libraries do not, or the other way
// around. Made by tests/interop/unicode_additions.py.
#pragma once

#include <cstdint>

namespace burst {

// The characters that Unicode 15.0 to 16.0 added, by general category: the patterns of tokenizers and
// tiktoken know 16, PCRE2 10.42 knows 14. (One character that was there has another category since:
// U+1171E, Mc instead of Mn.)
struct UnicodeAddition {
  uint32_t first, last;  // code points
  char category[3];      // "Lu", ...
};

// Characters that utf8proc (2.8, Unicode 15.0) moves, combines or drops in normal form C and
// tokenizers (Unicode 9) leaves where they are.
struct UnicodeRange {
  uint32_t first, last;
};

// clang-format off
'''
CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So".split()


def code_points():
    return (c for c in range(1, 0x110000) if not 0xD800 <= c < 0xE000)


def of_category(category):
    """Returns the characters that the pattern \\p{category} matches in tokenizers."""
    split = pre_tokenizers.Split(Regex(r"\p{%s}" % category), "isolated")
    found = set()
    for base in range(0, 0x110000, 4096):
        text = "\x01".join(chr(c) for c in range(base, base + 4096) if not 0xD800 <= c < 0xE000 and c != 1)
        found |= {ord(piece) for piece, _ in split.pre_tokenize_str(text) if len(piece) == 1 and piece != "\x01"}
    return found


def ranges(values):
    """Returns ranges [first, last, value] of a list of (code point, value) in order."""
    result = []
    for c, value in values:
        if result and result[-1][1] == c - 1 and result[-1][2] == value:
            result[-1][1] = c
        else:
            result.append([c, c, value])
    return result


def moved():
    """Returns the characters whose place in normal form C differs.

    U+11930 is the end of a pair that combines. utf8proc 2.8 drops U+11A7 after a syllable of Hangul."""
    utf8proc, libc = ctypes.CDLL("libutf8proc.so.2"), ctypes.CDLL("libc.so.6")
    utf8proc.utf8proc_NFC.restype = ctypes.c_void_p
    nfc = normalizers.NFC()
    found = {0x11930, 0x11A7}
    for c in code_points():
        text = "a\u0345" + chr(c) + "\u0334\u0301"
        form = utf8proc.utf8proc_NFC(text.encode())
        if ctypes.string_at(form).decode() != nfc.normalize_str(text):
            found.add(c)
        libc.free(ctypes.c_void_p(form))
    return found


def write(declaration, rows):
    print(f"inline constexpr {declaration}[] = {{")
    line = "   "
    for row in rows:
        if len(line) + len(row) + 2 > 100:
            print(line)
            line = "   "
        line += f" {row},"
    print(line + "\n};")


def main():
    if unicodedata.unidata_version != "14.0.0":
        sys.exit("this Python has another version of Unicode than 14")
    category = {c: name for name in CATEGORIES for c in of_category(name)}
    added = [(c, category[c]) for c in sorted(category) if unicodedata.category(chr(c)) == "Cn"]
    print(HEADER, end="")
    write("UnicodeAddition kUnicodeAdditions",
          [f'{{0x{a:X}, 0x{b:X}, "{name}"}}' for a, b, name in ranges(added)])
    print()
    write("UnicodeRange kNotNormalized",
          [f"{{0x{a:X}, 0x{b:X}}}" for a, b, _ in ranges((c, 0) for c in sorted(moved()))])
    print("// clang-format on\n\n}  // namespace burst")


if __name__ == "__main__":
    main()
