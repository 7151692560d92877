/** What went wrong, in words for people: sign-in, roles, what is not there. */

import { ApiError } from "../api/client";

/** The text of any error. */
export function textOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** Why a sign-in failed; the API's own words speak of headers and commands. */
export function signInText(error: unknown): string {
  if (error instanceof ApiError && error.status === 401) {
    return "This token is not valid here: it is unknown, expired or revoked. Check that it was copied whole, or ask an admin for another one.";
  }
  if (error instanceof ApiError && error.status === 429) return "Too many attempts. Wait a minute and try again.";
  if (error instanceof ApiError && error.status === 0) return `Not signed in: ${error.message}.`;
  return textOf(error);
}
