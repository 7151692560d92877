/** Dotted names as a collapsible tree of modules. Pure. */

export interface Leaf {
  name: string;
  numel: number;
}

export type Row<T extends Leaf> =
  | { kind: "branch"; path: string; label: string; depth: number; leaves: number; numel: number; open: boolean }
  | { kind: "leaf"; item: T; label: string; depth: number };

interface Branch<T extends Leaf> {
  path: string;
  label: string;
  children: (Branch<T> | T)[];
  byLabel: Map<string, Branch<T>>;
  leaves: number;
  numel: number;
}

export type Tree<T extends Leaf> = Branch<T>;

export function treeOf<T extends Leaf>(items: readonly T[]): Tree<T> {
  const root = branch<T>("", "");
  for (const item of items) {
    const parts = item.name.split(".");
    let at = root;
    add(at, item.numel);
    for (let depth = 0; depth < parts.length - 1; depth += 1) {
      const label = parts[depth]!;
      let next = at.byLabel.get(label);
      if (!next) {
        next = branch<T>(at.path ? `${at.path}.${label}` : label, label);
        at.byLabel.set(label, next);
        at.children.push(next);
      }
      at = next;
      add(at, item.numel);
    }
    at.children.push(item);
  }
  return root;
}

/** The visible rows: branches, and the contents of open ones. */
export function rowsOf<T extends Leaf>(tree: Tree<T>, closed: ReadonlySet<string>): Row<T>[] {
  const rows: Row<T>[] = [];
  const walk = (node: Branch<T>, depth: number): void => {
    for (const child of node.children) {
      if (!isBranch(child)) {
        rows.push({ kind: "leaf", item: child, label: child.name.split(".").at(-1)!, depth });
        continue;
      }
      const open = !closed.has(child.path);
      const { path, label, leaves, numel } = child;
      rows.push({ kind: "branch", path, label, depth, leaves, numel, open });
      if (open) walk(child, depth + 1);
    }
  };
  walk(tree, 0);
  return rows;
}

function isBranch<T extends Leaf>(child: Branch<T> | T): child is Branch<T> {
  return "byLabel" in child;
}

function branch<T extends Leaf>(path: string, label: string): Branch<T> {
  return { path, label, children: [], byLabel: new Map(), leaves: 0, numel: 0 };
}

function add<T extends Leaf>(node: Branch<T>, numel: number): void {
  node.leaves += 1;
  node.numel += numel;
}
