/** A button that opens a list of actions; one that is chosen, a click elsewhere and Escape close it. */

import { type ReactNode, useEffect, useRef } from "react";

export function Menu(props: { label: string; children: ReactNode }): ReactNode {
  const ref = useRef<HTMLDetailsElement>(null);
  useEffect(() => {
    const onDown = (event: Event): void => {
      const menu = ref.current;
      if (menu?.open && !menu.contains(event.target as Node)) menu.open = false;
    };
    document.addEventListener("pointerdown", onDown);
    return () => document.removeEventListener("pointerdown", onDown);
  }, []);
  const close = (): void => {
    if (ref.current) ref.current.open = false;
  };
  return (
    <details
      className="menu"
      ref={ref}
      onKeyDown={(event) => {
        if (event.key !== "Escape" || !ref.current?.open) return;
        close();
        ref.current.querySelector("summary")?.focus();
      }}
    >
      <summary>{props.label}</summary>
      <div className="items" onClick={close}>
        {props.children}
      </div>
    </details>
  );
}
