import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONObject;
import com.alibaba.fastjson2.JSONWriter;
import java.io.BufferedReader;
import java.io.BufferedWriter;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.OutputStreamWriter;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Paths;
import java.util.Base64;
import java.util.Map;

/** Reads requests from one file and writes answers to another, one JSON object per line. Libraries write to stdout. */
final class Lines {
    private final BufferedReader requests;
    private final BufferedWriter answers;

    interface Program {
        void run(Lines lines) throws Exception;
    }

    /** Runs a program and ends the JVM: shutdown() of a client takes seconds, and its threads continue after errors. */
    static void serve(String[] files, Program program) {
        int code = 0;
        try {
            program.run(new Lines(files));
        } catch (Throwable failed) {
            failed.printStackTrace();
            System.err.flush();
            code = 1;
        }
        Runtime.getRuntime().halt(code);
    }

    private Lines(String[] files) throws IOException {
        // An answer can have half of a surrogate pair. It has no form in UTF-8, so it is written as an escape in ASCII.
        requests = new BufferedReader(new InputStreamReader(
            Files.newInputStream(Paths.get(files[0])), StandardCharsets.US_ASCII));
        answers = new BufferedWriter(new OutputStreamWriter(
            new FileOutputStream(files[1]), StandardCharsets.US_ASCII));
    }

    /** Returns the next request, null after the last one. */
    JSONObject next() throws IOException {
        String line = requests.readLine();
        return line == null ? null : JSON.parseObject(line);
    }

    void answer(Map<String, Object> answer) throws IOException {
        answers.write(JSON.toJSONString(
            answer, JSONWriter.Feature.EscapeNoneAscii, JSONWriter.Feature.WriteNulls));
        answers.write('\n');
        answers.flush();
    }

    static byte[] bytes(JSONObject request, String name) {
        return Base64.getDecoder().decode(request.getString(name));
    }

    static String base64(byte[] data) {
        return data == null ? null : Base64.getEncoder().encodeToString(data);
    }
}
