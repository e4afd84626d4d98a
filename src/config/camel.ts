/** From the file's `snake_case` keys to the code's `camelCase`, in the type and in the value. */
import { Secret } from './values.ts';

type CamelKey<S> = S extends `${infer Head}_${infer Tail}`
  ? `${Head}${Capitalize<CamelKey<Tail>>}`
  : S;

type Leaf = string | number | boolean | bigint | null | undefined | Secret;

/** `T` with camelCase keys at every depth, all read-only. */
export type Camelized<T> = T extends Leaf
  ? T
  : T extends readonly (infer Item)[]
    ? readonly Camelized<Item>[]
    : { readonly [Key in keyof T as CamelKey<Key>]: Camelized<T[Key]> };

const camelKey = (key: string): string =>
  key.replace(/_([a-z0-9])/g, (_, letter: string) => letter.toUpperCase());

/** Copies with camelCase keys and freezes every object and array of the copy. */
export function camelizeFrozen<T>(value: T): Camelized<T> {
  return copy(value) as Camelized<T>;
}

function copy(value: unknown): unknown {
  if (value instanceof Secret) return value;
  if (Array.isArray(value)) return Object.freeze(value.map(copy));
  if (typeof value !== 'object' || value === null) return value;
  const entries = Object.entries(value).map(([key, item]) => [camelKey(key), copy(item)] as const);
  return Object.freeze(Object.fromEntries(entries));
}
