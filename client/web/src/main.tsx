import "./style/tokens.css";
import "./style/base.css";
import "./style/layout.css";

import { createRoot } from "react-dom/client";

import { App } from "./app";

createRoot(document.getElementById("root")!).render(<App />);
