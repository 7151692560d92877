/** What is watched, how often and when last; the button that turns on what is not. */

import { type ReactNode, useEffect, useState } from "react";

import { post } from "../api/client";
import { Trouble } from "../ui/bits";
import { useMay, useShared } from "../ui/context";
import { useSending } from "../ui/form";

/** In words, from the verdict; nothing for a run that is over. */
export function Watching(): ReactNode {
  const { summary } = useShared();
  const mayEdit = useMay("edit");
  const watches = summary?.state === "ended" ? [] : (summary?.verdict.watches ?? []);
  if (watches.length === 0) return null;
  const off = watches.find((one) => one.turn_on);
  return (
    <>
      <p className="faint wrap">{watches.map((one) => one.text).join("; ")}.</p>
      {off && (
        <p>
          <TurnOn />{" "}
          <span className="faint">
            {mayEdit ? "or " : ""}
            <code>{off.turn_on}</code>, until this run ends; for every run, <code>watch = true</code> in <code>[alerts]</code>
          </span>
        </p>
      )}
    </>
  );
}

/** Turns on all that is off; nothing where all is on, or for viewers. */
export function TurnOn(): ReactNode {
  const { job, summary } = useShared();
  const mayEdit = useMay("edit");
  const sending = useSending();
  const [asked, setAsked] = useState(false);
  const isOff = summary?.state !== "ended" && (summary?.verdict.watches ?? []).some((one) => one.turn_on);
  // Once it is on, a later "off" is somebody else's.
  useEffect(() => {
    if (!isOff) setAsked(false);
  }, [isOff]);
  if (!isOff || !mayEdit) return null;
  const turn = (): void => sending.send(post("/api/v1/jobs/{job}/watch", { path: { job }, body: { on: true } }), () => setAsked(true));
  return (
    <>
      <button type="button" className="small" disabled={sending.busy || asked} onClick={turn}>
        {asked ? "Turned on" : "Turn on"}
      </button>
      {sending.problem && <Trouble>{sending.problem}</Trouble>}
    </>
  );
}
