"""Shell completion scripts, which ask `fp8cfg completion --words` for the completions of a word."""

from __future__ import annotations

SCRIPTS = {
    "bash": (
        r"""# fp8cfg: add to ~/.bashrc: source <(fp8cfg completion bash)
_fp8cfg() {
    # Whole words up to the cursor: bash itself would split them at = and :
    local line=${COMP_LINE:0:COMP_POINT} words candidate IFS=$' \t\n'
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local current=${words[${#words[@]}-1]} keep=""
    # What stands before the last = or : is there already, and is not to be given again.
    [[ $COMP_WORDBREAKS == *=* && $current == *=* ]] && keep=${current%"${current##*=}"}
    [[ $COMP_WORDBREAKS == *:* && $current == *:* ]] && keep=${current%"${current##*:}"}
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("${candidate#"$keep"}")
    done < <("${words[0]/#\~/$HOME}" completion --words "${words[@]:1}" 2>/dev/null)
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
}
complete -o default -F _fp8cfg fp8cfg
"""
    ),
    "zsh": (
        r"""# fp8cfg: add to ~/.zshrc, after compinit: source <(fp8cfg completion zsh)
_fp8cfg() {
    local -a found open
    local program=${(Q)words[1]/#\~/$HOME}
    found=("${(@f)$($program completion --words "${(@Q)words[2,CURRENT]}" 2>/dev/null)}")
    found=(${found:#})
    if (( ! ${#found} )); then
        _files
        return
    fi
    open=(${(M)found:#*[=.]})
    found=(${found:#*[=.]})
    compadd -Q -S '' -- $open
    compadd -Q -- $found
}
compdef _fp8cfg fp8cfg
"""
    ),
    "fish": (
        r"""# fp8cfg: add to ~/.config/fish/config.fish: fp8cfg completion fish | source
function __fp8cfg_words
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    set -l found ($before[1] completion --words $before[2..-1] "$current" 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else
        __fish_complete_path "$current"
    end
end
complete -c fp8cfg -f -a '(__fp8cfg_words)'
"""
    ),
}
