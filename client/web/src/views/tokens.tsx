/** Tokens of users: made, shown once, revoked. For admins. */

import { type FormEvent, type ReactNode, useState } from "react";

import { del, get, invitationFor, post } from "../api/client";
import type { NewToken, TokenDocument, TokenRequest } from "../api/schema";
import { clock } from "../lib/format";
import { Badge, Dialog, Empty, Line, Name, Panel, Source, Trouble } from "../ui/bits";
import { useShared } from "../ui/context";
import { Question, Select, Text, useSending } from "../ui/form";
import { useNow, usePoll } from "../ui/hooks";

const ROLES: readonly (readonly [TokenRequest["role"], string])[] = [
  ["viewer", "see jobs, names, alerts and statistics"],
  ["reader", "and values of parameters"],
  ["editor", "and edit, pause"],
  ["exporter", "read, and export"],
  ["trainer", "see, and register trainings"],
  ["admin", "everything"],
];
const LIFETIMES = [["3600", "1 hour"], ["86400", "1 day"], ["604800", "1 week"], ["2592000", "30 days"]] as const;

export function Tokens(): ReactNode {
  const { session } = useShared();
  const now = useNow();
  const [made, setMade] = useState<NewToken | null>(null);
  const [revoking, setRevoking] = useState<TokenDocument | null>(null);
  const tokens = usePoll("tokens", (signal) => get("/api/v1/tokens", { signal }), 60_000);
  const rows = tokens.data?.tokens ?? [];
  return (
    <Panel title="Tokens" source={<Source what="/tokens" at={tokens.at} error={tokens.error} refresh={tokens.refresh} />}>
      {tokens.error && <Trouble>{tokens.error}</Trouble>}
      {session.readonly ? (
        <p className="faint">This control plane is read-only: no token can be made.</p>
      ) : (
        <Create
          onMade={(token) => {
            setMade(token);
            tokens.refresh();
          }}
        />
      )}
      {tokens.data && rows.length === 0 && <Empty>Only the owner's token so far.</Empty>}
      {rows.length > 0 && (
        <div className="scroll" tabIndex={0} role="region" aria-label="Tokens">
          <table className="plain roomy" aria-label="Tokens">
            <thead>
              <tr>
                <th>name</th>
                <th>role</th>
                <th>created</th>
                <th>expires</th>
                <th>state</th>
              </tr>
            </thead>
            <tbody>
              {rows.map((token) => (
                <tr key={token.name}>
                  <td>
                    <Name>{token.name}</Name>
                  </td>
                  <td>{token.role}</td>
                  <td>{clock(token.created_s)}</td>
                  <td>{token.expires_s === null ? "never" : clock(token.expires_s)}</td>
                  <td>
                    {token.revoked_s !== null ? (
                      <Badge state="revoked" tone="bad" />
                    ) : token.expires_s !== null && token.expires_s * 1000 < now ? (
                      <Badge state="expired" tone="mute" />
                    ) : (
                      <button type="button" className="small danger" onClick={() => setRevoking(token)}>
                        Revoke …
                      </button>
                    )}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {made && <Secret token={made} onClose={() => setMade(null)} />}
      {revoking && <Revoke token={revoking} onClose={() => setRevoking(null)} onDone={tokens.refresh} />}
    </Panel>
  );
}

function Create(props: { onMade: (token: NewToken) => void }): ReactNode {
  const [role, setRole] = useState<TokenRequest["role"]>("viewer");
  const [name, setName] = useState("");
  const [ttl, setTtl] = useState<string>("86400");
  const { busy, problem, send } = useSending();
  const submit = (event: FormEvent): void => {
    event.preventDefault();
    send(post("/api/v1/tokens", { body: { role, ttl_s: Number(ttl), name: name.trim() || null } }), (token) => {
      setName("");
      props.onMade(token);
    });
  };
  return (
    <form className="form" aria-label="New token" onSubmit={submit}>
      <Text label="Name of its owner or purpose" name="token-name" max={64} placeholder="optional" value={name} onChange={setName} />
      <Select label="Role" name="role" wide="broad" value={role} options={ROLES.map(([each, what]) => [each, `${each}: ${what}`] as const)} onChange={(each) => setRole(each as TokenRequest["role"])} />
      <Select label="Valid for" name="ttl" value={ttl} options={LIFETIMES} onChange={setTtl} />
      <div className="actions">
        <button type="submit" disabled={busy}>
          Make a token
        </button>
      </div>
      {problem && <div className="full"><Trouble>{problem}</Trouble></div>}
    </form>
  );
}

function Secret(props: { token: NewToken; onClose: () => void }): ReactNode {
  const { token, onClose } = props;
  const { job } = useShared();
  const [copied, setCopied] = useState(false);
  const [link, setLink] = useState("");
  const { problem, send } = useSending();
  const invite = (): void => send(invitationFor(token.token), (code) => setLink(`${window.location.origin}/#/sign-in/${code}/${encodeURIComponent(job)}`));
  return (
    <Dialog title={`Token ${token.name}`} onClose={onClose}>
      <p>This is the only time that it is shown. Its role is {token.role}.</p>
      <p className="secret" data-testid="secret">
        {token.token}
      </p>
      <p>
        To sign in, open <code>{window.location.origin}/</code> and paste it, or send a link that works once, within an hour:
      </p>
      {link ? (
        <Line>{link}</Line>
      ) : (
        <button type="button" onClick={invite}>
          Make an invitation link
        </button>
      )}
      {problem && <Trouble>{problem}</Trouble>}
      <p>From another machine first, with the name of this control plane's host:</p>
      <Line>{`ssh -N -L ${window.location.port || "443"}:${window.location.host} HOST`}</Line>
      <div className="foot">
        <button type="button" onClick={() => void navigator.clipboard?.writeText(token.token).then(() => setCopied(true))}>
          {copied ? "Copied" : "Copy"}
        </button>
        <button type="button" className="main" onClick={onClose}>
          Done
        </button>
      </div>
    </Dialog>
  );
}

function Revoke(props: { token: TokenDocument; onClose: () => void; onDone: () => void }): ReactNode {
  const { token, onClose, onDone } = props;
  const sending = useSending();
  const revoke = (): void =>
    sending.send(del("/api/v1/tokens/{name}", { path: { name: token.name } }), () => {
      onDone();
      onClose();
    });
  return (
    <Question title={`Revoke token ${token.name}?`} action="Revoke" danger sending={sending} onGo={revoke} onClose={onClose}>
      <p>Whoever uses it is refused at once, their open pages are signed out, and its name is never given again. This cannot be undone.</p>
    </Question>
  );
}
