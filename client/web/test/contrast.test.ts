/** Text is readable on every ground that it stands on: WCAG's AA, 4.5 to 1. */

import { describe, expect, it } from "vitest";

import css from "../src/style/tokens.css?raw";

function tokens(block: string): Map<string, string> {
  return new Map([...block.matchAll(/--([\w-]+):\s*(#[0-9a-f]{6});/g)].map((found) => [found[1]!, found[2]!]));
}

const [lightBlock = "", darkBlock = ""] = css.split(':root[data-theme="dark"]');
const themes = { light: tokens(lightBlock), dark: tokens(darkBlock) };

function luminance(hex: string): number {
  const [r, g, b] = [1, 3, 5].map((at) => {
    const part = Number.parseInt(hex.slice(at, at + 2), 16) / 255;
    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  }) as [number, number, number];
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(a: string, b: string): number {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y) as [number, number];
  return (high + 0.05) / (low + 0.05);
}

const GROUNDS = ["ground", "panel", "sunken", "hover", "pick"];
const PAIRS: [string, string][] = [
  ...GROUNDS.flatMap((ground): [string, string][] => [["text", ground], ["faint", ground]]),
  ["accent", "panel"],
  ["on-accent", "accent"],
  ["bad", "panel"],
  ...["ok", "warn", "bad", "info"].flatMap((tone): [string, string][] => [[tone, `${tone}-back`], ["text", `${tone}-back`]]),
  ["faint", "mute-back"],
  ["faint", "warn-back"],
  ["faint", "bad-back"],
];

describe.each(Object.entries(themes))("in the %s theme", (_, theme) => {
  it.each(PAIRS)("%s on %s is readable", (ink, ground) => {
    expect(contrast(theme.get(ink)!, theme.get(ground)!)).toBeGreaterThanOrEqual(4.5);
  });
});
