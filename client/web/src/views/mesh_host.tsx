/** What a rank's sidecar sees of its host: what may slow the rank, and the numbers. */

import type { ReactNode } from "react";

import type { DeviceDocument, HostDocument } from "../api/schema";
import { bytes, count, duration, number, percent } from "../lib/format";

/** A share from 0 to 1; below 0 it is unknown. */
function share(value: number): string {
  return value < 0 ? "unknown" : percent(value, 1);
}

function deviceText(one: DeviceDocument): string {
  const parts = [
    one.busy >= 0 ? `${share(one.busy)} busy` : "",
    one.clock_mhz > 0 ? `${count(one.clock_mhz)} of ${count(one.most_clock_mhz)} MHz` : "",
    one.throttled.length ? `slowed by ${one.throttled.join(", ")}` : "",
    one.celsius >= 0 ? `${count(one.celsius)} °C` : "",
    one.memory_bytes > 0 ? `${bytes(one.used_bytes)} of ${bytes(one.memory_bytes)}` : "",
    one.ecc_errors > 0 ? `${count(one.ecc_errors)} ECC errors` : "",
    one.xid > 0 ? `Xid ${one.xid}` : "",
  ];
  return parts.filter(Boolean).join(", ") || "no figures";
}

/** For the facts of one rank. */
export function hostRows(host: HostDocument | null): [string, ReactNode][] {
  if (!host) return [["its host", "not sampled yet"]];
  const swap = host.swap_in_bytes_s + host.swap_out_bytes_s;
  return [
    ["what may slow it", host.why || "nothing to be seen"],
    ["processors in use", `${share(host.busy)} of ${count(host.processors)}, ${share(host.others)} by others`],
    ["trainer's processors", host.trainer_processors < 0 ? "unknown" : number(host.trainer_processors, 3)],
    ["trainer waits for one", share(host.trainer_delay)],
    ["host's free memory", `${bytes(host.memory_available_bytes)} of ${bytes(host.memory_bytes)}`],
    ["waits for memory", share(host.memory_pressure)],
    ["swapped", swap < 0 ? "unknown" : `${bytes(swap)} per second`],
    ["busiest disk", share(host.disk_busy)],
    ["network", host.network_bytes_s < 0 ? "unknown" : `${bytes(host.network_bytes_s)} per second`],
    ...(host.clock_jump_ms !== 0 ? [["clock jumped", duration(host.clock_jump_ms / 1000)] as [string, ReactNode]] : []),
    ...host.devices.map((one): [string, ReactNode] => [`GPU ${one.index}${one.name ? `, ${one.name}` : ""}`, deviceText(one)]),
  ];
}
