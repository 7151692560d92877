/** Sign-in: the token goes into one header of one request, and is kept nowhere. */

import { type FormEvent, type ReactNode, useState } from "react";

import { signIn } from "../api/client";
import type { SessionDocument } from "../api/schema";
import { Trouble } from "./bits";

export function SignIn(props: {
  problem: string;
  onSignedIn: (session: SessionDocument) => void;
}): ReactNode {
  const [token, setToken] = useState("");
  const [problem, setProblem] = useState(props.problem);
  const [busy, setBusy] = useState(false);
  const submit = (event: FormEvent): void => {
    event.preventDefault();
    setBusy(true);
    signIn(token.trim())
      .then(props.onSignedIn)
      .catch((error: unknown) => {
        setProblem(error instanceof Error ? error.message : String(error));
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
          The token of the job stands in <code>endpoint.json</code> of its state directory; an admin
          makes others: <code>paramd token create --role viewer</code>.
        </p>
      </form>
    </div>
  );
}
