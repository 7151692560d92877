/** Light or dark: the system's preference unless the user chose one. */

import { useCallback, useEffect, useState } from "react";

const KEY = "paramd.theme";
const system = window.matchMedia("(prefers-color-scheme: dark)");

function wanted(): boolean {
  const chosen = localStorage.getItem(KEY);
  return chosen ? chosen === "dark" : system.matches;
}

export function useTheme(): [boolean, () => void] {
  const [dark, setDark] = useState(wanted);
  // Set before children render: canvases read the theme's colours.
  document.documentElement.dataset["theme"] = dark ? "dark" : "light";
  useEffect(() => {
    const follow = (): void => setDark(wanted());
    system.addEventListener("change", follow);
    return () => system.removeEventListener("change", follow);
  }, []);
  const toggle = useCallback(() => {
    setDark((old) => {
      localStorage.setItem(KEY, old ? "light" : "dark");
      return !old;
    });
  }, []);
  return [dark, toggle];
}
