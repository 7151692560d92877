/** Orders of tables. Pure. */

/** The largest first, the smallest first, the order that there was. Names begin with A. */
export function nextSort(sort: string, key: string): string {
  const [first, second] = key === "name" || key === "dtype" ? [key, `-${key}`] : [`-${key}`, key];
  if (sort === first) return second;
  return sort === second ? "" : first;
}

/** Sorted by "key" or "-key"; what is not known comes last either way. */
export function sortedBy<T>(rows: readonly T[], sort: string, read: (row: T, key: string) => string | number | null): readonly T[] {
  const key = sort.replace(/^-/, "");
  if (!key) return rows;
  const sign = sort.startsWith("-") ? -1 : 1;
  const keyed = rows.map((row): [string | number | null, T] => [read(row, key), row]);
  const unknown = (value: string | number | null): boolean => value === null || Number.isNaN(value);
  keyed.sort(([a], [b]) => {
    if (unknown(a) || unknown(b)) return Number(unknown(a)) - Number(unknown(b));
    return a! < b! ? -sign : a! > b! ? sign : 0;
  });
  return keyed.map(([, row]) => row);
}
