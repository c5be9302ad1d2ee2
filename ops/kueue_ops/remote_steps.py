"""The scripts that run on a host: look, start, stop, renew, doctor, put a configuration there. Plain ``sh``.

Each is text between the prologue and epilogue of `remote_script`, made of the functions in `remote_parts`; the values
of Python are put in front as assignments, quoted. What they tell is read in `remote`.
"""

from __future__ import annotations

from kueue_ops.remote_parts import FIND, SCREENS, SERVICE
from kueue_ops.remote_script import quote
from kueue_ops.sight import SESSION

START_SECONDS = 6
"""How long a start is watched: until the worker holds its lock, or is gone."""
SERVICE_STOP_SECONDS = 25
"""The unit's own limit for a stop, after which the worker is killed, and a little more."""

ASK = (
    FIND
    + r"""
state=
if [ -n "$line" ]; then
  answer=$(eval "$line --status" 2>&1 </dev/null; echo "exit $?")
  printf '%s\n' "$answer" | tell status
  state=$(printf '%s\n' "$answer" | sed -n 's/^{.*"state_dir": "\([^"]*\)".*/\1/p')
fi
"""
)

LOOK = (
    ASK
    + SCREENS
    + SERVICE
    + r"""
say host_name "$(uname -n | cut -d. -f1)"
say boot_id "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)"
choose_screens
say has_screen "$has_screen"
if [ -n "$has_screen" ]; then
  say screen_dir "$SCREENDIR"
  sessions | tell session
  foreign | tell foreign
  sessions | grep '(Dead' | while read -r id rest; do
    limited 10 screen -wipe "$id.@SESSION@" >/dev/null 2>&1 </dev/null
  done
fi
if command -v busctl >/dev/null 2>&1; then
  say kills "$(limited 5 busctl --system get-property org.freedesktop.login1 /org/freedesktop/login1 \
    org.freedesktop.login1.Manager KillUserProcesses 2>/dev/null </dev/null)"
fi
if [ -e "/var/lib/systemd/linger/$(id -un)" ]; then say lingers yes; fi
ask_service
if [ -n "$is_used" ]; then say service.used yes; tell_service; fi
""".replace("@SESSION@", SESSION)
)

# What must come to its end when the connection goes away. A handler, since children inherit what is ignored.
HOLD = r"""
trap : HUP PIPE TERM
"""

# Streams are cut off from ours one by one (5 is the answer): a daemon that holds one keeps the connection open.
_BRING_UP = r"""
word() { printf "'%s'" "$(printf %s "$1" | sed "s/'/'\\\\''/g")"; }
prepare() {
  size=$( { wc -c < "$log"; } 2>/dev/null || echo 0 )
  inner='unset INVOCATION_ID JOURNAL_STREAM NOTIFY_SOCKET SYSTEMD_EXEC_PID;'
  for name in LD_LIBRARY_PATH LD_PRELOAD; do
    eval "value=\${$name-}"
    # screen is a set-id program in places, and those lose these variables.
    if [ -n "$value" ]; then inner="$inner $name=$(word "$value"); export $name;"; fi
  done
  inner="$inner $command"
  scope=
  if [ -n "$kills" ] && command -v systemd-run >/dev/null 2>&1; then
    : "${XDG_RUNTIME_DIR:=/run/user/$(id -u)}"
    export XDG_RUNTIME_DIR
    if limited 10 systemd-run --user --scope --quiet true >/dev/null 2>&1 </dev/null 5>&-; then
      scope='systemd-run --user --scope --quiet --'
      say scope yes
    fi
  fi
}
news() { { tail -c "+$((size + 1))" "$log" 2>/dev/null || true; } | tail -n 5; }
ours_now() {
  found=$(listing)
  for id in $(living); do case " $others " in *" $id "*) ;; *) echo "$id"; return ;; esac; done
}
in_screen() {
  how=screen
  others=$(foreign | cut -d ' ' -f 1 | tr '\n' ' ')
  [ -n "$(ours_now)" ] && return
  limited 10 $scope screen -dmS @SESSION@ sh -c "$inner" </dev/null >"$state/start.txt" 2>&1 5>&-
  say start.exit $?
  tell start.err < "$state/start.txt"
}
# The reader holds the first words alone: this worker has nobody who looks, and says everything to its log as well.
by_setsid() {
  how=setsid
  : > "$state/start.txt"
  {
    { $scope setsid sh -c "$inner" </dev/null 2>&1 >/dev/null 5>&-; echo "exit $?" > "$state/start.exit"; } |
      setsid sh -c 'head -c 16384 > "$1"; exec cat >/dev/null' sh "$state/start.txt"
  } </dev/null >/dev/null 2>&1 5>&- &
  child=$!
}
by_service() {
  how=service
  service 30 systemctl --user --no-block restart "$unit" 2>&1 | tell start.err
}
is_up() {
  case $how in
    screen)
      window=$(ours_now)
      [ -n "$window" ] || return 1
      window=$(children "$window")
      window=${window%% *}
      if [ -n "$window" ]; then echo "$window $(born "$window")" > "$state/session.txt"; fi
      ;;
    setsid) kill -0 $child 2>/dev/null ;;
    service)
      ask_service
      case $(fact ActiveState).$(fact SubState) in *.auto-restart | failed.* | inactive.*) return 1 ;; esac
      ;;
  esac
}
watch() {
  turns=0 missing=0 pid= gone=
  while [ $turns -lt "$1" ]; do
    pid=$(holder)
    if [ -n "$pid" ] && [ "$pid" != "$before" ]; then break; fi
    pid=
    # A session shows up a moment after the command that makes it has returned.
    if is_up; then missing=0; else missing=$((missing + 1)); fi
    if [ $missing -ge 4 ]; then gone=yes; break; fi
    nap
    turns=$((turns + 1))
  done
}
bring_up() {
  rm -f "$state/start.exit"
  prepare
  pid= how=
  if [ -n "$by_unit" ]; then
    by_service
    watch "${1:-@TURNS@}"
    # Not for this host after all: the unit's condition tells only when it is tried. Of a unit that nothing refers to
    # (another host of the same home has enabled it meanwhile) systemd forgets at once when that was.
    if [ -n "$gone" ]; then
      if [ "$(fact ActiveState) $(fact ConditionResult)" = "inactive no" ]; then is_used=; fi
      if [ -z "$is_used" ]; then how=; else tell_service; fi
    fi
  fi
  if [ -z "$how" ]; then
    choose_screens
    if [ -n "$has_screen" ]; then
      in_screen
      watch @TURNS@
      # It died without a word, or screen started nothing: a try under our own eyes tells why, or does it.
      if [ -n "$gone" ] && [ -z "$(news)" ] && [ ! -s "$state/start.txt" ]; then
        say again yes
        by_setsid
        watch @TURNS@
      fi
    else
      by_setsid
      watch @TURNS@
    fi
  fi
  say how "$how"
  if [ -n "$pid" ]; then say pid "$pid"; return; fi
  if [ -n "$gone" ]; then say gone yes; fi
  news | tell said
  if [ "$how" = setsid ]; then
    tail -n 5 "$state/start.txt" 2>/dev/null | tell start.err
    # The reader is the last of the two to end.
    say ended "$(sed -n 's/^exit //p' "$state/start.exit" 2>/dev/null)"
  fi
}
has_room() {
  probe=$state/.room.$$
  e=$( { head -c 16384 /dev/zero > "$probe"; } 2>&1 )
  code=$?
  rm -f "$probe"
  if [ -z "$e" ] && [ $code = 0 ]; then return 0; fi
  say disk "$e"
  return 1
}
""".replace("@SESSION@", SESSION).replace("@TURNS@", str(4 * START_SECONDS))

START = (
    HOLD
    + SCREENS
    + SERVICE
    + _BRING_UP
    + r"""
# One that has given its lock up may take a moment to go; only the worker itself can tell.
before=$(holder)
if [ -n "$before" ]; then
  case $(eval "$line --status" 2>/dev/null </dev/null) in
    *'"is_running": true'*) say how running; say pid "$before"; say end .; exit ;;
  esac
fi
if has_room; then bring_up; fi
"""
)

# A worker takes SIGHUP, which is what a session that ends sends, for "read the configuration again".
_BRING_DOWN = r"""
bring_down() {
  ask_service
  case $(fact ActiveState) in
    active | activating | reloading | deactivating)
      asked service 'service 45 systemctl --user stop "$unit"'
      say service.enabled "$(fact UnitFileState)"
      ;;
  esac
  down=0
  if [ -n "$line" ]; then
    said=$(eval "$line --stop$force" 2>&1 </dev/null)
    down=$?
    say stop.exit $down
    printf '%s\n' "$said" | tell stop.out
  fi
  choose_screens
  [ -n "$has_screen" ] || return 0
  for id in $(ours); do
    alone=
    if is_only_worker "$id"; then alone=yes; fi
    targets=$(workers_of "$id")
    for one in $targets; do kill -TERM "$one" 2>/dev/null; done
    turns=0
    while [ -d "/proc/$id" ] && [ -n "$(workers_of "$id")" ] && [ $turns -lt 20 ]; do nap; turns=$((turns + 1)); done
    # Other windows of that session are somebody's.
    if [ -n "$alone" ] && [ -d "/proc/$id" ]; then
      limited 3 screen -S "$id.@SESSION@" -X quit >/dev/null 2>&1 </dev/null 5>&-
      if [ -n "$force" ] && [ "$(cat "/proc/$id/comm" 2>/dev/null)" = screen ]; then kill -KILL "$id"; fi
    fi
    if [ -n "$force" ]; then for one in $targets; do if is_worker "$one"; then kill -KILL "$one"; fi; done; fi
    say ended "$id"
  done
}
""".replace("@SESSION@", SESSION)

STOP = SCREENS + SERVICE + _BRING_DOWN + "\nbring_down\n"

# One script for both halves: a connection that breaks between them must not leave the host without a worker.
RENEW = (
    HOLD
    + SCREENS
    + SERVICE
    + _BRING_UP
    + _BRING_DOWN
    + r"""
before=$(holder)
if has_room; then
  ask_service
  main=$(fact MainPID)
  if [ -n "$by_unit" ] && { [ -z "$before" ] || [ "$before" = "$main" ]; }; then
    bring_up @LONG@
  else
    bring_down
    now=$(holder)
    # Somebody else was quicker.
    if [ -n "$now" ] && [ "$now" != "$before" ]; then say how running; say pid "$now"
    elif [ "$down" = 0 ] || [ -z "$now" ]; then before=$now; bring_up
    fi
  fi
fi
""".replace("@LONG@", str(4 * (START_SECONDS + SERVICE_STOP_SECONDS)))
)

DOCTOR = (
    FIND
    + r"""
kueue=
case $path in */*) if [ -x "${path%/*}/kueue" ]; then kueue=$(word "${path%/*}/kueue"); fi ;; esac
if [ -z "$kueue" ]; then
  first=$(eval "set -- $line" 2>/dev/null && printf %s "$1")
  case $first in */*) if [ -x "${first%/*}/kueue" ]; then kueue=$(word "${first%/*}/kueue"); fi ;; esac
fi
if [ -z "$kueue" ]; then kueue=$(command -v kueue 2>/dev/null); fi
say kueue "$kueue"
if [ -n "$kueue" ]; then
  if [ -n "$config" ]; then kueue="$kueue --config $(word "$config")"; fi
  asked doctor "$kueue doctor --json"
fi
"""
)

PUSH = r"""
exec 6<&0
umask 077
LC_ALL=C
export LC_ALL
to=${config:-${KUEUE_CONFIG:-${XDG_CONFIG_HOME:-$HOME/.config}/kueue/config.toml}}
case $to in "~/"*) to=$HOME/${to#"~/"} ;; esac
# A file that is a link, to a collection of such files perhaps, stays one.
if [ -L "$to" ]; then to=$(readlink -f "$to"); fi
say to "$to"
folder=${to%/*}
fresh=$folder/.config.toml.$$
asked push '
  { [ -d "$folder" ] || mkdir -p -m 700 "$folder"; } || exit 1
  trap "rm -f \"\$fresh\"" EXIT
  cat <&6 > "$fresh" || exit 1
  # A start-up file that reads has eaten some of it.
  [ "$(wc -c < "$fresh")" -eq "$size" ] || { say damaged yes; exit 1; }
  chmod 600 "$fresh" || exit 1
  if [ -e "$to" ]; then
    if cmp -s "$fresh" "$to"; then chmod 600 "$to"; say result same; exit 0; fi
    if [ -z "$force" ]; then say result differs; exit 0; fi
  fi
  mv -f "$fresh" "$to" || exit 1
  say result written
'
"""


def assigned(script: str, **values: str) -> str:
    """The script with these shell variables in front of it."""
    return "\n".join(f"{name}={quote(value)}" for name, value in values.items()) + "\n" + script
