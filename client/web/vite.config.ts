import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { gzipSync } from "node:zlib";

import react from "@vitejs/plugin-react";
import type { Plugin } from "vite";
import { defineConfig } from "vitest/config";

const OUT = "../../service/paramd_service/control/web";

/** Leaves a gzipped copy beside each asset, so that the server packs nothing itself. */
function packed(): Plugin {
  return {
    name: "packed",
    apply: "build",
    closeBundle() {
      const folder = join(OUT, "assets");
      for (const name of readdirSync(folder)) {
        const content = readFileSync(join(folder, name));
        writeFileSync(join(folder, `${name}.gz`), gzipSync(content, { level: 9 }));
      }
    },
  };
}

export default defineConfig({
  plugins: [react(), packed()],
  base: "/",
  build: {
    outDir: OUT,
    emptyOutDir: true,
    target: "es2023",
    // A data: URL of a script would need a weaker policy than the server sends.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    chunkSizeWarningLimit: 900,
  },
  // The contrast of its colours is tested.
  test: { css: true },
});
