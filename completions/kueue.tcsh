complete kueue 'p@*@`env _ARGCOMPLETE=1 _ARGCOMPLETE_SHELL=tcsh _ARGCOMPLETE_IFS=" " sh -c "kueue 8>&1 >/dev/null 2>&1 </dev/null"`@' ;
complete kueue_server 'p@*@`env _ARGCOMPLETE=1 _ARGCOMPLETE_SHELL=tcsh _ARGCOMPLETE_IFS=" " sh -c "kueue 8>&1 >/dev/null 2>&1 </dev/null"`@' ;
complete kueue_worker 'p@*@`env _ARGCOMPLETE=1 _ARGCOMPLETE_SHELL=tcsh _ARGCOMPLETE_IFS=" " sh -c "kueue 8>&1 >/dev/null 2>&1 </dev/null"`@' ;
complete kueue_restart_workers 'p@*@`env _ARGCOMPLETE=1 _ARGCOMPLETE_SHELL=tcsh _ARGCOMPLETE_IFS=" " sh -c "kueue 8>&1 >/dev/null 2>&1 </dev/null"`@' ;
complete kueue_install 'p@*@`env _ARGCOMPLETE=1 _ARGCOMPLETE_SHELL=tcsh _ARGCOMPLETE_IFS=" " sh -c "kueue 8>&1 >/dev/null 2>&1 </dev/null"`@' ;
