%% A way into a test node: evaluates what arrives on the Unix socket "control" in the node's working directory.
%%
%% Run by `erl -eval 'file:eval("control.erl").'` after RabbitMQ has booted. A frame is four bytes of length and text in
%% UTF-8: Erlang expressions with their final dot. Each is answered by a frame with "ok " and the value, or "no " and what
%% was raised. Who may open the socket is the business of the directory's mode.
Evaluate = fun(Text) ->
    {ok, Tokens, _} = erl_scan:string(unicode:characters_to_list(Text)),
    {ok, Expressions} = erl_parse:parse_exprs(Tokens),
    {value, Value, _} = erl_eval:exprs(Expressions, []),
    Value
end,
Answer = fun(Text) ->
    {Kind, Term} =
        try
            {"ok ", Evaluate(Text)}
        catch
            Class:Reason -> {"no ", {Class, Reason}}
        end,
    unicode:characters_to_binary(io_lib:format("~s~0tp", [Kind, Term]))
end,
Serve = fun Serve(Socket) ->
    case gen_tcp:recv(Socket, 0) of
        {ok, Text} ->
            ok = gen_tcp:send(Socket, Answer(Text)),
            Serve(Socket);
        {error, _} ->
            gen_tcp:close(Socket)
    end
end,
Accept = fun Accept(Listener) ->
    {ok, Socket} = gen_tcp:accept(Listener),
    Server = spawn(fun() ->
        receive
            yours -> Serve(Socket)
        end
    end),
    ok = gen_tcp:controlling_process(Socket, Server),
    Server ! yours,
    Accept(Listener)
end,
spawn(fun() ->
    Options = [{ifaddr, {local, "control"}}, binary, {packet, 4}, {active, false}, {backlog, 64}],
    {ok, Listener} = gen_tcp:listen(0, Options),
    Accept(Listener)
end).
