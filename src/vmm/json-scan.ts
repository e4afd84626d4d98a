/**
 * Reads the bulk answers (bitmap words, range lists) straight from their bytes: a million integers
 * without a million objects, each exact to the last of its 64 bits. Everything else goes through
 * `exact-json.ts`. Time is linear in the text; nesting is bounded; nothing is trusted.
 */
import { Failure } from '../result.ts';
import { badAnswer, type VmmError } from './errors.ts';

const QUOTE = 0x22;
const BACKSLASH = 0x5c;
const COMMA = 0x2c;
const COLON = 0x3a;
const OPEN_ARRAY = 0x5b;
const CLOSE_ARRAY = 0x5d;
const OPEN_OBJECT = 0x7b;
const CLOSE_OBJECT = 0x7d;
const ZERO = 0x30;
const NINE = 0x39;

/** Digits taken at a time: 10^6 × 2^32 is still exact in a double. */
const CHUNK_DIGITS = 6;
const TWO_32 = 2 ** 32;
const DEPTH_MAX = 64;
const powers = [1, 10, 100, 1e3, 1e4, 1e5, 1e6] as const;

export class JsonScanner {
  readonly #text: Uint8Array;
  readonly #what: string;
  #at = 0;
  /** Low and high 32 bits of the last `u64`. */
  low = 0;
  high = 0;

  /** @param what names the answer in error messages. */
  constructor(text: Uint8Array, what: string) {
    this.#text = text;
    this.#what = what;
  }

  /** The byte where the next token starts; give it to `seek` to come back. */
  get position(): number {
    this.#skipSpace();
    return this.#at;
  }

  seek(position: number): void {
    this.#at = position;
  }

  /** Calls `member` with each key of the object; it must consume the value. */
  object(field: string, member: (key: string) => void): void {
    this.#expect(OPEN_OBJECT, field, 'an object');
    if (this.#peek() === CLOSE_OBJECT) {
      this.#at += 1;
      return;
    }
    for (;;) {
      const key = this.#string(field);
      this.#expect(COLON, field, 'a colon');
      member(key);
      const next = this.#next();
      if (next === CLOSE_OBJECT) return;
      if (next !== COMMA) this.fail(field, 'is not closed');
    }
  }

  /** Calls `element` with each index of the array; it must consume the value. */
  array(field: string, element: (index: number) => void): void {
    this.#expect(OPEN_ARRAY, field, 'an array');
    if (this.#peek() === CLOSE_ARRAY) {
      this.#at += 1;
      return;
    }
    for (let index = 0; ; index += 1) {
      element(index);
      const next = this.#next();
      if (next === CLOSE_ARRAY) return;
      if (next !== COMMA) this.fail(field, 'is not closed');
    }
  }

  /** Reads an unsigned 64-bit integer into `low` and `high`. */
  u64(field: string | (() => string)): void {
    this.#skipSpace();
    const text = this.#text;
    const start = this.#at;
    let end = start;
    while (end < text.length && isDigit(text[end] ?? 0)) end += 1;
    const digits = end - start;
    const after = text[end] ?? 0;
    const leadingZero = digits > 1 && text[start] === ZERO;
    if (digits === 0 || digits > 20 || leadingZero || continuesNumber(after)) this.#notU64(field);
    let low = 0;
    let high = 0;
    for (let at = start; at < end;) {
      const take = Math.min(CHUNK_DIGITS, end - at);
      let chunk = 0;
      for (let i = 0; i < take; i += 1) chunk = chunk * 10 + ((text[at + i] ?? 0) - ZERO);
      const power = powers[take as 1];
      const wide = low * power + chunk;
      low = wide % TWO_32;
      high = high * power + Math.floor(wide / TWO_32);
      at += take;
    }
    if (high >= TWO_32) this.#notU64(field);
    this.#at = end;
    this.low = low;
    this.high = high;
  }

  /** An unsigned integer that must be below 2^53. */
  count(field: string | (() => string)): number {
    const start = this.position;
    this.u64(field);
    if (this.high >= 0x20_0000) {
      this.seek(start);
      const name = typeof field === 'string' ? field : field();
      this.fail(name, `must be below 2^53, got ${this.#token()}`);
    }
    return this.high * TWO_32 + this.low;
  }

  /** Skips one value of any kind. */
  skip(field: string): void {
    this.#skipValue(field, 0);
  }

  /** Only white space may follow. */
  end(): void {
    this.#skipSpace();
    if (this.#at < this.#text.length) this.fail('', 'has something after its end');
  }

  fail(field: string, problem: string): never {
    throw new Failure<VmmError>(badAnswer(this.#what, field, problem));
  }

  #notU64(field: string | (() => string)): never {
    const name = typeof field === 'string' ? field : field();
    this.fail(name, `must be an unsigned 64-bit integer, got ${this.#token()}`);
  }

  #token(): string {
    let end = this.#at;
    while (end < this.#text.length && end < this.#at + 40 && !endsToken(this.#text[end] ?? 0)) {
      end += 1;
    }
    const token = Buffer.from(this.#text.subarray(this.#at, end)).toString('latin1');
    return token === '' ? 'something else' : token;
  }

  #skipValue(field: string, depth: number): void {
    if (depth > DEPTH_MAX) this.fail(field, 'is nested too deeply');
    const first = this.#peek();
    if (first === OPEN_OBJECT) this.object(field, () => this.#skipValue(field, depth + 1));
    else if (first === OPEN_ARRAY) this.array(field, () => this.#skipValue(field, depth + 1));
    else if (first === QUOTE) this.#string(field);
    else this.#skipScalar(field);
  }

  #skipScalar(field: string): void {
    const start = this.#at;
    while (this.#at < this.#text.length && !endsToken(this.#text[this.#at] ?? 0)) this.#at += 1;
    if (this.#at === start) this.fail(field, 'has no value');
  }

  #string(field: string): string {
    this.#expect(QUOTE, field, 'a string');
    const start = this.#at;
    let escaped = false;
    for (; ; this.#at += 1) {
      const byte = this.#text[this.#at];
      if (byte === undefined) this.fail(field, 'ends in the middle of a string');
      if (byte === QUOTE) break;
      if (byte === BACKSLASH) {
        escaped = true;
        this.#at += 1;
      }
    }
    const raw = Buffer.from(this.#text.subarray(start, this.#at)).toString('utf8');
    this.#at += 1;
    if (!escaped) return raw;
    try {
      return JSON.parse(`"${raw}"`) as string;
    } catch {
      this.fail(field, 'has a malformed string');
    }
  }

  #skipSpace(): void {
    while (isSpace(this.#text[this.#at] ?? 0)) this.#at += 1;
  }

  #peek(): number {
    this.#skipSpace();
    return this.#text[this.#at] ?? 0;
  }

  #next(): number {
    const byte = this.#peek();
    this.#at += 1;
    return byte;
  }

  #expect(byte: number, field: string, what: string): void {
    if (this.#next() === byte) return;
    this.#at = Math.max(0, this.#at - 1);
    const ended = this.#at >= this.#text.length;
    this.fail(field, ended ? 'ends too early' : `must be ${what}, got ${this.#token()}`);
  }
}

function isDigit(byte: number): boolean {
  return byte >= ZERO && byte <= NINE;
}

function isSpace(byte: number): boolean {
  return byte === 0x20 || byte === 0x0a || byte === 0x0d || byte === 0x09;
}

/** `.`, `e`, `E`: what follows the digits of a number that is no plain integer. */
function continuesNumber(byte: number): boolean {
  return byte === 0x2e || byte === 0x65 || byte === 0x45;
}

function endsToken(byte: number): boolean {
  return isSpace(byte) || byte === COMMA || byte === CLOSE_ARRAY || byte === CLOSE_OBJECT;
}
