/** Sign-in: the token is sent in one header of one request and never stored. */

import { type FormEvent, type ReactNode, useEffect, useState } from "react";

import { signIn, signInWithCode } from "../api/client";
import type { SessionDocument } from "../api/schema";
import { Trouble } from "./bits";
import { signInText } from "./problems";

export function SignIn(props: {
  problem: string;
  onSignedIn: (session: SessionDocument) => void;
}): ReactNode {
  const [token, setToken] = useState("");
  const [problem, setProblem] = useState(props.problem);
  const [busy, setBusy] = useState(false);
  // Of the page that was here: its state is no longer known.
  useEffect(() => {
    document.title = "Sign in · paramd";
  }, []);
  const submit = (event: FormEvent): void => {
    event.preventDefault();
    setBusy(true);
    signIn(token.trim())
      .then(props.onSignedIn)
      .catch((error: unknown) => {
        setProblem(signInText(error));
        setBusy(false);
      });
  };
  return (
    <div className="signin">
      <form onSubmit={submit} className="panel">
        <div className="brand">
          <img src="/favicon.svg" alt="" />
          <span>paramd</span>
        </div>
        <label className="field">
          Token
          <input
            type="password"
            name="token"
            autoComplete="off"
            autoFocus
            required
            value={token}
            onChange={(event) => setToken(event.target.value)}
          />
        </label>
        {problem && <Trouble>{problem}</Trouble>}
        <button className="main" type="submit" disabled={busy || !token.trim()}>
          Sign in
        </button>
        <p className="faint">
          The job's own token is in <code>endpoint.json</code> in its state directory. An admin can
          create others: <code>paramd token create --role viewer</code>.
        </p>
      </form>
    </div>
  );
}

/** Asks before a link of another token replaces the session that is open: it may be somebody else's link. */
export function OtherToken(props: {
  text: string;
  code: string;
  stay: () => void;
  onSignedIn: (session: SessionDocument) => void;
}): ReactNode {
  const [problem, setProblem] = useState("");
  const replace = (): void => {
    signInWithCode(props.code, true)
      .then(props.onSignedIn)
      .catch((error: unknown) => setProblem(signInText(error)));
  };
  return (
    <div className="signin">
      <div className="panel" role="alertdialog" aria-label="Another token">
        <div className="brand">
          <img src="/favicon.svg" alt="" />
          <span>paramd</span>
        </div>
        <p>The link that you opened belongs to another token: {props.text.replace(/; sign out first.*$/, "")}.</p>
        {problem && <Trouble>{problem}</Trouble>}
        <button className="main" type="button" autoFocus onClick={props.stay}>
          Stay signed in
        </button>
        <button type="button" onClick={replace}>
          Use the link
        </button>
      </div>
    </div>
  );
}
