# Completion of kueue for bash. In ~/.bashrc: eval "$(kueue complete bash)"
_kueue() {
    local program=${1//\\/} answer code
    [[ $program == "~/"* ]] && program=$HOME/${program:2}
    case $program in
        */kueue) ;;
        */kueue_*) program=${program%/*}/kueue ;;
        *) program=kueue ;;
    esac
    command -v -- "$program" > /dev/null 2>&1 || program=kueue
    COMPREPLY=()
    answer=$(
        export COMP_LINE COMP_POINT _ARGCOMPLETE=1 _ARGCOMPLETE_SHELL=bash _ARGCOMPLETE_IFS=$'\n' _KUEUE_NATIVE=1
        export _ARGCOMPLETE_COMP_WORDBREAKS=$COMP_WORDBREAKS
        command -- "$program" 8>&1 < /dev/null > /dev/null 2>&1
    )
    code=$?
    if ((code == 10)); then
        compopt -o default 2> /dev/null
    elif ((code == 11)); then
        _kueue_command "$answer"
    elif ((code == 0)) && [[ -n $answer ]]; then
        mapfile -t COMPREPLY <<< "$answer"
        compopt -o nosort 2> /dev/null
        [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace 2> /dev/null
    fi
    return 0
}

# The command that kueue is to run begins behind so many words.
_kueue_command() {
    local rest=$COMP_LINE gap index count=-1
    for ((index = 0; index < COMP_CWORD; index++)); do
        gap=${rest%%[![:space:]]*}
        rest=${rest#"$gap"}
        # Bash also cuts words at signs like = and :, a blank alone begins a new one.
        [[ $index == 0 || -n $gap ]] && ((++count))
        ((count >= $1)) && break
        rest=${rest#"${COMP_WORDS[index]}"}
    done
    if declare -F _command_offset > /dev/null; then
        _command_offset "$index"
    elif ((index == COMP_CWORD)) && [[ ${COMP_WORDS[COMP_CWORD]} != */* ]]; then
        mapfile -t COMPREPLY < <(compgen -c -- "${COMP_WORDS[COMP_CWORD]}" | sort -u)
        [[ -n ${COMPREPLY[0]-} ]] || compopt -o default 2> /dev/null
    else
        compopt -o default 2> /dev/null
    fi
}

complete -F _kueue kueue kueue_server kueue_worker kueue_restart_workers kueue_install
