/** CRC-64 with Jones' polynomial, reflected, from 0: what Firecracker ends its state files with. */
const POLY_HIGH = 0x95ac9329;
const POLY_LOW = 0xac4bc9b5;

const high = new Uint32Array(256);
const low = new Uint32Array(256);
for (let byte = 0; byte < 256; byte += 1) {
  let [h, l] = [0, byte];
  for (let bit = 0; bit < 8; bit += 1) {
    const carry = (l & 1) === 1;
    l = ((l >>> 1) | (h << 31)) >>> 0;
    h >>>= 1;
    if (carry) [h, l] = [(h ^ POLY_HIGH) >>> 0, (l ^ POLY_LOW) >>> 0];
  }
  high[byte] = h;
  low[byte] = l;
}

/** Of data that ends with its own sum, little-endian, it is 0. */
export function crc64(data: Uint8Array): bigint {
  let [h, l] = [0, 0];
  for (const byte of data) {
    const at = (l ^ byte) & 0xff;
    l = (((l >>> 8) | (h << 24)) ^ (low[at] ?? 0)) >>> 0;
    h = ((h >>> 8) ^ (high[at] ?? 0)) >>> 0;
  }
  return (BigInt(h) << 32n) | BigInt(l);
}
