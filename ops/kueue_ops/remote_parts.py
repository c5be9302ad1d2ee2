"""What the scripts for hosts share, as functions of ``sh``: finding the worker, its screen sessions, its unit.

They use what the prologue of `remote_script` defines.
"""

from __future__ import annotations

from kueue.cli.program_places import PLACES
from kueue_ops.sight import SESSION, UNIT

# `path` is one file, `line` a command as a person wrote it into worker_command.
FIND = (
    r"""
path= line=
if [ -n "$setting" ]; then
  case $setting in "~/"*) s=$HOME/${setting#"~/"} ;; *) s=$setting ;; esac
  if [ -f "$s" ] && [ -x "$s" ]; then path=$s
  else
    first=$(eval "set -- $setting" 2>/dev/null && printf %s "$1")
    if [ -n "$first" ] && command -v "$first" >/dev/null 2>&1; then line=$setting; else say tried "$setting"; fi
  fi
else
  path=$(command -v kueue_worker 2>/dev/null)
  case $path in "" | /*) ;; *) path=$PWD/$path ;; esac
  if [ -z "$path" ]; then
    say tried "PATH ($PATH)"
    for d in """
    + " ".join(f'"{place}"' for place in PLACES)
    + r"""; do
      if [ -f "$d/kueue_worker" ] && [ -x "$d/kueue_worker" ]; then path=$d/kueue_worker; break; fi
      say tried "$d"
    done
  fi
fi
word() { printf "'%s'" "$(printf %s "$1" | sed "s/'/'\\\\''/g")"; }
if [ -n "$path" ]; then line=$(word "$path"); say path "$path"; fi
say line "$line"
"""
)

# A session is ours if it runs a worker under our name: somebody's editor may have that name as well. `SCREENDIR` of a
# second try lies in the worker's own state directory.
SCREENS = r"""
listing() { limited 5 screen -ls 2>&1 </dev/null; }
is_listing() { case $1 in *"No Sockets found"* | *"Socket in "* | *"Sockets in "*) return 0 ;; esac; return 1; }
own_screens() {
  mine=$state/screen
  # The address of a socket holds 107 bytes, the name of the session among them.
  if [ ${#mine} -gt 80 ]; then mine=/tmp/kueue-$(id -u)-$(printf %s "$state" | cksum | cut -d ' ' -f 1); fi
  [ -n "$state" ] && { [ -d "$mine" ] || mkdir -m 700 "$mine" 2>/dev/null; } && [ ! -L "$mine" ] && [ -O "$mine" ]
}
choose_screens() {
  has_screen=
  command -v screen >/dev/null 2>&1 || return 0
  found=$(listing)
  if is_listing "$found"; then has_screen=1; return 0; fi
  say screen_trouble "$(printf %s "$found" | tail -n 1)"
  if own_screens; then
    SCREENDIR=$mine; export SCREENDIR
    found=$(listing)
    if is_listing "$found"; then has_screen=1; else rmdir "$mine" 2>/dev/null; fi
  fi
}
sessions() {
  printf '%s\n' "$found" | while read -r id rest; do
    if [ "$id" = "${id%%.*}.@SESSION@" ]; then printf '%s %s\n' "${id%%.*}" "$rest"; fi
  done
}
living() { sessions | grep -v -e '(Dead' -e '(Remote' | cut -d ' ' -f 1; }
children() { cat "/proc/$1/task/$1/children" 2>/dev/null; }
born() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 20; }
# A worker by what it was started as, or what START has written down of its window.
is_worker() {
  if [ "$1 $(born "$1")" = "$(cat "$state/session.txt" 2>/dev/null)" ]; then return 0; fi
  tr '\0' '\n' 2>/dev/null < "/proc/$1/cmdline" | {
    read -r a; read -r b; read -r c
    case ${a##*/} in
      kueue_worker) return 0 ;;
      python* | pypy* | sh | bash | dash | ash | ksh* | zsh)
        case $b in kueue_worker | */kueue_worker) return 0 ;; -m) case $c in kueue.worker*) return 0 ;; esac ;; esac ;;
    esac
    return 1
  }
}
workers_of() {
  for child in $(children "$1"); do
    if is_worker "$child"; then echo "$child"
    else for below in $(children "$child"); do if is_worker "$below"; then echo "$below"; fi; done
    fi
  done
}
is_only_worker() { for child in $(children "$1"); do is_worker "$child" || return 1; done; }
ours() { for id in $(living); do if [ -n "$(workers_of "$id")" ]; then echo "$id"; fi; done; }
foreign() {
  for id in $(living); do
    if [ -z "$(workers_of "$id")" ]; then
      first=$(children "$id")
      echo "$id $(cat "/proc/${first%% *}/comm" 2>/dev/null)"
    fi
  done
}
holder() {
  p= s=
  read -r p s 2>/dev/null < "$state/lock" || return 0
  [ -r "/proc/$p/stat" ] || return 0
  if [ "$(born "$p")" = "$s" ]; then printf %s "$p"; fi
}
""".replace("@SESSION@", SESSION)

# The unit that the installer gives; a host that does not fulfil the unit's conditions has none.
SERVICE = r"""
unit=@UNIT@
service() { limited "$@" </dev/null 5>&-; }
ask_service() {
  facts= is_used=
  command -v systemctl >/dev/null 2>&1 || return 0
  : "${XDG_RUNTIME_DIR:=/run/user/$(id -u)}"
  # It is there as long as the manager runs; without it the question would wait.
  [ -S "$XDG_RUNTIME_DIR/systemd/private" ] || return 0
  export XDG_RUNTIME_DIR
  facts=$(service 10 systemctl --user show "$unit" -p LoadState -p ActiveState -p SubState -p UnitFileState \
    -p MainPID -p ConditionResult -p ConditionTimestampMonotonic -p Result -p ExecMainStatus 2>/dev/null)
  [ "$(fact LoadState)" = loaded ] || return 0
  case $(fact ActiveState) in
    active | activating | reloading | deactivating | failed) is_used=1 ;;
    *)
      case $(fact UnitFileState) in
        enabled*)
          is_used=1
          if [ "$(fact ConditionResult)" = no ] && [ "$(fact ConditionTimestampMonotonic)" != 0 ]; then is_used=; fi
          ;;
      esac
      ;;
  esac
}
fact() { printf '%s\n' "$facts" | sed -n "s/^$1=//p"; }
tell_service() {
  say service "$(fact ActiveState) $(fact SubState) $(fact UnitFileState) $(fact MainPID) $(fact Result) \
$(fact ExecMainStatus)"
  limited 5 journalctl --user -q -n 1 -o cat -u "$unit" 2>/dev/null </dev/null 5>&- | tell service.said
}
""".replace("@UNIT@", UNIT)
