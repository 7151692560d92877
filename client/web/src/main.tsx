import "./style/tokens.css";
import "./style/base.css";
import "./style/layout.css";

import { createRoot } from "react-dom/client";

import { App } from "./app";

// The server's policy (trusted types) forbids markup from strings. The canvas library clears an
// element that way, so the empty string, and nothing else, is allowed.
(window as { trustedTypes?: { createPolicy: (name: string, rules: object) => unknown } }).trustedTypes?.createPolicy(
  "default",
  { createHTML: (text: string) => (text === "" ? "" : null) },
);

createRoot(document.getElementById("root")!).render(<App />);
